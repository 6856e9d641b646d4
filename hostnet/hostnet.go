// Package hostnet is the kernel's view of one network device, by netlink:
// its addresses, its routes with their MTUs, the multicast groups joined on it.
//
// It decides nothing. It applies the [rtnl.Route] values that its caller gives, and reports what is
// there: first everything, as a [rtnl.Resync] event, then each change. Which route gets which MTU
// is the caller's decision.
//
// Its events have only routes that the kernel or we made. The kernel decides which route a packet
// takes: [Device.Lookup] asks it, and after an [rtnl.Rerouted] event it must be asked again. The
// kernel sends no notification of changes of net.ipv4.fib_multipath_hash_policy and its like, nor
// of proxy neighbors ([Device.Proxies]).
//
// A device belongs to the network namespace of the thread that called [Open]; so do all
// later calls on it, from any goroutine. Those that write below /proc/sys enter that
// namespace; where /proc/sys is read-only, only they fail, with EROFS.
package hostnet

import (
	"errors"

	"ipoibcm/rtnl"
)

// ErrNotFound is returned when a route, rule, address or device is not there.
var ErrNotFound = rtnl.ErrNotFound

// ErrEnter is returned when the thread may not enter a network namespace.
var ErrEnter = errors.New("hostnet: cannot enter the network namespace")

// ErrExists is returned when somebody else's route is in the place of ours.
var ErrExists = rtnl.ErrExists

var errClosed = errors.New("hostnet: closed")

// EventBound is how many events [Device.Events] holds. If the reader lags further behind, the
// events that do not fit are lost and a Resync follows.
const EventBound = 256
