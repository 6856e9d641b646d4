package agent

import (
	"maps"
	"net/netip"
	"sync"
	"time"

	"ipoibcm/ratelimit"
)

const (
	// attemptRate is how many wrong passwords a second a host may send, attemptBurst how many at once.
	// So whoever mistypes a password can try again, and a thousand attempts take two hours.
	attemptRate, attemptBurst = 1.0 / 8, 10
	// maxAttempters is how many hosts have an allowance of their own. Further hosts share one.
	maxAttempters = 1024
)

// attempts limits wrong passwords by host. Nobody can try many. A host that tries many keeps no other
// host out that has an allowance of its own.
type attempts struct {
	mu     sync.Mutex
	hosts  map[netip.Prefix]*ratelimit.Bucket
	others ratelimit.Bucket
}

// mayTry reports whether a request from addr is looked at. addr is as net/http has it.
func (a *attempts) mayTry(addr string, now time.Time) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	b := a.of(hostOf(addr))
	return b == nil || b.Left(now, attemptRate, attemptBurst) >= 1
}

// of returns the allowance of a host. It returns nil if the host can have one of its own, and has none yet.
func (a *attempts) of(host netip.Prefix) *ratelimit.Bucket {
	if b := a.hosts[host]; b != nil || len(a.hosts) < maxAttempters {
		return b
	}
	return &a.others
}

// wrong notes that addr sent a wrong password.
func (a *attempts) wrong(addr string, now time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	host := hostOf(addr)
	if a.of(host) == &a.others {
		maps.DeleteFunc(a.hosts, func(_ netip.Prefix, b *ratelimit.Bucket) bool { return b.Full(now, attemptRate) })
	}
	b := a.of(host)
	if b == nil {
		if a.hosts == nil {
			a.hosts = map[netip.Prefix]*ratelimit.Bucket{}
		}
		b = new(ratelimit.Bucket)
		a.hosts[host] = b
	}
	b.Take(now, attemptRate, attemptBurst)
}

// hostOf returns the host of an address with a port. For IPv6 it returns the /64 subnet, because one host
// may have as many addresses in it as it likes.
func hostOf(addr string) netip.Prefix {
	ap, err := netip.ParseAddrPort(addr)
	if err != nil {
		return netip.Prefix{} // all such requests share one entry
	}
	a, bits := ap.Addr().Unmap().WithZone(""), 64
	if a.Is4() {
		bits = 32
	}
	p, _ := a.Prefix(bits)
	return p
}
