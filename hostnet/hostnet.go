// Package hostnet is the kernel's view of one network device, by netlink:
// its addresses, its routes with their MTUs, the multicast groups joined on it.
//
// It decides nothing. It applies the [rtnl.Route] values it is given and reports what
// is there: first everything, as a [rtnl.Resync] event, then each change. Which route
// gets which MTU is for mtu and ipoib to say.
//
// Multipath routes are not mirrored, only counted. A device belongs to the
// network namespace of the thread that called [Open]; so do all later calls on
// it, from any goroutine, except those on files under /proc/sys, which are
// opened by [Open] and by the setters through /proc/thread-self and so must be
// called in that namespace too.
package hostnet

import "errors"

// ErrNotFound is returned when what is to be removed is not there.
var ErrNotFound = errors.New("hostnet: not found")

// ErrExists is returned when another's route stands where ours should.
var ErrExists = errors.New("hostnet: another's route is there")

var errClosed = errors.New("hostnet: closed")

// EventBound is how many events [Device.Events] holds. When the reader lags
// behind further, those held give way to one Resync.
const EventBound = 256
