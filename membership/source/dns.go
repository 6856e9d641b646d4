package source

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"

	"ipoibcm/ib"
	"ipoibcm/membership"
)

// A DNS is the list of members that a name has in DNS: each A or AAAA record is a member. If the name
// begins with _, such as _ipoibcm._udp.example.com, each target of its SRV records is a member, with the
// target's addresses.
type DNS struct {
	Host     string
	Every    time.Duration // between two questions; zero means 30 s
	Resolver Resolver      // nil means the system's, without libc
}

// A Resolver asks DNS. *net.Resolver is one.
type Resolver interface {
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
	LookupSRV(ctx context.Context, service, proto, name string) (string, []*net.SRV, error)
}

const (
	defaultEvery = 30 * time.Second
	retryEvery   = 2 * time.Second // after a failure, doubled up to Every
	dnsPatience  = 10 * time.Second
	// maxTargets bounds the targets of SRV records that are looked up.
	maxTargets = membership.MaxMembers
	// missedAnswers is how many answers in a row must lack a member before the member is gone: a server may
	// answer with a part of a long list, and with another part each time.
	missedAnswers = 3
)

// Name is the source as a URL.
func (d *DNS) Name() string { return "dns://" + d.Host }

// Run asks at intervals until ctx ends.
func (d *DNS) Run(ctx context.Context, tell func(membership.Event)) {
	var m missing
	every, retry := cmp.Or(d.Every, defaultEvery), retryEvery
	for ctx.Err() == nil {
		ev := d.Look(ctx)
		if ctx.Err() != nil {
			return
		}
		wait := every
		if l, ok := ev.(membership.Listed); ok {
			retry = retryEvery
			var again bool
			if ev, again = m.keep(l); again {
				wait = min(every, retryEvery)
			}
		} else {
			wait = min(every, retry)
			retry = min(2*retry, every)
		}
		tell(ev)
		pause(ctx, jittered(wait))
	}
}

// Look asks once.
func (d *DNS) Look(ctx context.Context) membership.Event {
	ctx, cancel := context.WithTimeout(ctx, dnsPatience)
	defer cancel()
	r := cmp.Or[Resolver](d.Resolver, &net.Resolver{PreferGo: true})
	if strings.HasPrefix(d.Host, "_") {
		return d.lookSRV(ctx, r)
	}
	addrs, err := lookAddrs(ctx, r, d.Host)
	if err != nil {
		return membership.Failed{Err: err}
	}
	var l membership.Listed
	for _, a := range addrs {
		l.Members = append(l.Members, membership.Member{ID: a.String(), GIDs: []ib.GID{ib.GIDFromAddr(a)}, By: d.Host})
	}
	return l
}

func (d *DNS) lookSRV(ctx context.Context, r Resolver) membership.Event {
	_, targets, err := r.LookupSRV(ctx, "", "", d.Host)
	if err != nil {
		return membership.Failed{Err: err}
	}
	if len(targets) > maxTargets {
		return membership.Failed{Err: fmt.Errorf("%s has %d SRV records, at most %d can be", d.Host,
			len(targets), maxTargets)}
	}
	var l membership.Listed
	seen := map[string]bool{}
	for _, t := range targets {
		id := strings.TrimSuffix(t.Target, ".")
		if id == "" || seen[id] { // RFC 2782: a dot as target means that there is none
			continue
		}
		seen[id] = true
		addrs, err := lookAddrs(ctx, r, t.Target)
		if err != nil {
			l.Bad = append(l.Bad, membership.Bad{ID: id, Err: err})
			continue
		}
		m := membership.Member{ID: id, By: d.Host}
		for _, a := range addrs[:min(len(addrs), membership.MaxGIDs)] {
			m.GIDs = append(m.GIDs, ib.GIDFromAddr(a))
		}
		l.Members = append(l.Members, m)
	}
	if len(l.Members) == 0 && len(l.Bad) > 0 {
		return membership.Failed{Err: l.Bad[0].Err}
	}
	return l
}

// lookAddrs returns the IPv4 and IPv6 addresses of a name. It fails if there are neither. It also fails if
// the query for one of them fails for another reason than that there are none, because the list would not
// be whole.
func lookAddrs(ctx context.Context, r Resolver, name string) ([]netip.Addr, error) {
	v4, err4 := r.LookupNetIP(ctx, "ip4", name)
	v6, err6 := r.LookupNetIP(ctx, "ip6", name)
	for _, err := range []error{err4, err6} {
		if err != nil && !notFound(err) {
			return nil, err
		}
	}
	if err4 != nil && err6 != nil {
		return nil, err4
	}
	var out []netip.Addr
	for _, a := range append(v4, v6...) {
		if a = a.Unmap(); a.Zone() == "" {
			out = append(out, a)
		}
	}
	return out, nil
}

func notFound(err error) bool {
	var e *net.DNSError
	return errors.As(err, &e) && e.IsNotFound
}

// missing holds the last list, and how many answers in a row have left out each missing member.
type missing struct {
	last  []membership.Member
	times map[string]int
}

// keep adds to an answer the members of earlier answers that fewer than missedAnswers answers in a row have
// left out, this one included. It reports whether there were any.
func (m *missing) keep(l membership.Listed) (membership.Listed, bool) {
	here := map[string]bool{}
	for _, x := range l.Members {
		here[x.ID] = true
	}
	times := map[string]int{}
	for _, x := range m.last {
		if n := m.times[x.ID] + 1; !here[x.ID] && n < missedAnswers && len(l.Members) < membership.MaxMembers {
			times[x.ID] = n
			l.Members = append(l.Members, x)
		}
	}
	m.last, m.times = l.Members, times
	return l, len(times) > 0
}
