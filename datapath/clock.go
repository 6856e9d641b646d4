package datapath

import "time"

// epoch is when the program began, but for an hour, so that no time of ours is zero.
var epoch = time.Now().Add(-time.Hour)

// nanotime is the time in nanoseconds, of a clock that nobody sets.
func nanotime() int64 { return int64(time.Since(epoch)) }

// wallTime is when nanotime was ns, as the wall has it now; comparisons with other times of
// the process are by the clock that nobody sets.
func wallTime(ns int64) time.Time { return epoch.Add(time.Duration(ns)) }
