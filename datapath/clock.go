package datapath

import "time"

// epoch is one hour before the program began, so that no time of ours is zero.
var epoch = time.Now().Add(-time.Hour)

// nanotime returns the nanoseconds since epoch by the monotonic clock.
func nanotime() int64 { return int64(time.Since(epoch)) }

// wallTime converts ns, a time of nanotime. The wall-clock time of the result counts on from the
// program's start, so setting the clock later does not change it. Comparisons with other times of
// the process use the monotonic clock.
func wallTime(ns int64) time.Time { return epoch.Add(time.Duration(ns)) }
