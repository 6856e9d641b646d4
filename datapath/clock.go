package datapath

import "time"

// epoch is one hour before the program began, so that no time of ours is zero.
var epoch = time.Now().Add(-time.Hour)

// nanotime returns the nanoseconds since epoch by the monotonic clock.
func nanotime() int64 { return int64(time.Since(epoch)) }

// wallTime converts ns, a time of nanotime. The wall clock in the result is that of the program's
// start plus the time since: a clock that was set later does not change it. Comparisons with other
// times of the process use the monotonic clock.
func wallTime(ns int64) time.Time { return epoch.Add(time.Duration(ns)) }
