package netns

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"
)

// Who connects to an address that nobody has learns so after three seconds, as on
// Ethernet, and does not wait until TCP gives up.
func TestConnectToNobody(t *testing.T) {
	parallel(t)
	s := newSegment(t, topology{})
	s.start()
	a := s.hosts[0]
	const least, most = 2 * time.Second, 6 * time.Second // three questions, a second each
	for _, dst := range []netip.Addr{a.v4.Next().Next().Next().Next(), a.v6.Next().Next().Next().Next()} {
		w := s.stopwatch()
		err := a.Do(func() error {
			ctx, stop := context.WithTimeout(t.Context(), patience)
			defer stop()
			c, err := new(net.Dialer).DialContext(ctx, "tcp", netip.AddrPortFrom(dst, 9).String())
			if err == nil {
				c.Close()
			}
			return err
		})
		took := time.Since(w.began)
		if !errors.Is(err, syscall.EHOSTUNREACH) {
			t.Errorf("%v: %v after %v, want %v", dst, err, took, syscall.EHOSTUNREACH)
		}
		if took < least {
			t.Errorf("%v: after %v, want %v at least", dst, took, least)
		}
		if err := w.over(most); err != nil {
			t.Errorf("%v: %v", dst, err)
		}
	}
}
