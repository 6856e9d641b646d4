package agent

import (
	"strings"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/ipoib"
	"ipoibcm/wire/encap"
)

// A peer of which only the GID is known is not shown as a link-layer address of zeros.
func TestPeerName(t *testing.T) {
	gid, _ := ib.ParseGID("fe80::b")
	if got := peerName(encap.LinkAddr{GID: gid}); got != "fe80::b" {
		t.Errorf("got %q, want the GID alone", got)
	}
	if got := peerName(encap.LinkAddr{Flags: encap.FlagRC, QPN: 0x49, GID: gid}); got != "80 000049 fe80::b" {
		t.Errorf("got %q, want all of it", got)
	}
}

func TestSilenceInWords(t *testing.T) {
	now := time.Unix(1000, 0)
	addr, _ := ib.ParseGID("::ffff:10.0.0.9")
	q := ipoib.Silence{Asked: addr.Addr().Unmap(), At: now.Add(-3 * time.Second)}
	if got := silence(q, now); !strings.Contains(got,
		"nobody answered for 10.0.0.9 3s ago, and no other host has been heard") {
		t.Errorf("never: %q", got)
	}
	q.Heard = now.Add(-time.Minute)
	if got := silence(q, now); !strings.Contains(got, "another host was last heard 1m0s ago") ||
		!strings.Contains(got, "UDP port 4791") {
		t.Errorf("not any more: %q", got)
	}
}
