package netns

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"ipoibcm/control"
	"ipoibcm/internal/expect"
)

// offloadsOff are configurations without some offloads.
var offloadsOff = []struct {
	name, yaml string
	off        []string
}{
	{"none", "", nil},
	{"gso", "offload: {gso: false}\n", []string{"gso"}},
	{"gro", "offload: {gro: false}\n", []string{"gro"}},
	{"one_thread", "offload: {one_thread: false}\n", []string{"one_thread"}},
	{"hold_p", "offload: {hold_p: false}\n", []string{"hold_p"}},
	{"busy_poll", "offload: {busy_poll: false}\n", []string{"busy_poll"}},
	{"connected", "offload: {connected: false}\n", []string{"connected"}},
	{"checksum", "offload: {checksum: false}\n", []string{"checksum"}},
	{"tso", "offload: {tso: false}\n", []string{"tso"}},
	{"uso", "offload: {uso: false}\n", []string{"uso"}},
	{
		"all",
		"offload: {gso: false, gro: false, one_thread: false, hold_p: false, busy_poll: false, connected: false, " +
			"checksum: false, tso: false, uso: false}\n",
		[]string{"gso", "gro", "one_thread", "hold_p", "busy_poll", "connected", "checksum", "tso", "uso"}},
}

// With each offload off, and all of them, everything arrives as it does with
// them; status says which are used, and how often.
func TestEachOffloadOff(t *testing.T) {
	parallel(t)
	for _, tt := range offloadsOff {
		t.Run(tt.name, func(t *testing.T) {
			parallel(t)
			s, a, b := newPair(t)
			for _, h := range s.hosts {
				h.run(h.config(tt.yaml)...)
			}
			a.connect(b, "RC")
			both(b, a.reach)
			end := time.Now().Add(patience)
			for { // until everything has been of use
				for _, dst := range []*host{a, b} {
					other := s.hosts[1-dst.i]
					other.send(dst, dst.v4, 16<<20)
					other.send(dst, dst.v6, 16<<20)
				}
				if len(idle(a)) == 0 && len(idle(b)) == 0 {
					break
				}
				if time.Now().After(end) {
					t.Fatalf("after %v of transfers %v of a and %v of b have not been used", patience, idle(a), idle(b))
				}
			}
			a.ping(b.v4, 65000, false)
			for _, h := range s.hosts {
				// Over a veth pair what is joined is what was sent as a batch.
				got := map[string]control.Offload{}
				for _, o := range h.status().Underlay.Offloads {
					got[o.Name] = o
				}
				for _, name := range []string{"gso", "gro", "one_thread", "hold_p", "busy_poll", "connected", "checksum",
					"tso", "uso"} {
					off := false
					for _, n := range tt.off {
						off = off || n == name
					}
					o, there := got[name]
					// Only the one thread holds its P, and who does not hold it does not
					// poll; whether polling was any use depends on the machine.
					switch {
					case name == "busy_poll" && !off && !got["hold_p"].On:
						unused(t, o, name+" without hold_p", "waits give their P back")
					case (name == "tso" || name == "uso") && !off && !got["checksum"].On:
						unused(t, o, name+" without checksum", "needs checksums by us: switched off")
					case !there:
						t.Errorf("status does not have %s", name)
					case off:
						unused(t, o, name, "switched off")
					case !o.On:
						t.Errorf("%s is off (%s), want it on", name, o.Why)
					}
				}
				out, _, _ := h.output("status", "--verbose", "--control", h.path(".sock"))
				if err := containsAll(out, fmt.Sprintf("gso: UDP_SEGMENT %s",
					map[bool]string{true: "on", false: "off"}[got["gso"].On])); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// unused checks that an offload is off, for that reason, and has not been of use.
func unused(t *testing.T, o control.Offload, what, why string) {
	t.Helper()
	expect.Equal(t, o.On, false, "%s: On", what)
	expect.Equal(t, o.Why, why, "%s: Why", what)
	expect.Equal(t, o.Uses, 0, "%s: Uses", what)
}

// idle lists the offloads that are on and have not been used, of those that traffic
// of some length uses sooner or later, whatever the machine does. Polling need not
// be of any use, and packets of the whole MTU are no GSO packets.
func idle(h *host) (names []string) {
	h.seg.Helper()
	on := map[string]bool{}
	offloads := h.status().Underlay.Offloads
	for _, o := range offloads {
		on[o.Name] = o.On
	}
	for _, o := range offloads {
		could := map[string]bool{"gso": true, "gro": on["gso"], "one_thread": true, "hold_p": on["one_thread"],
			"connected": true, "checksum": true}
		if o.On && o.Uses == 0 && could[o.Name] {
			names = append(names, o.Name)
		}
	}
	return names
}

// Where packets are short, TCP leaves the kernel and gets there in pieces of many;
// between the hosts they are packets, and nothing else changes.
func TestLongPieces(t *testing.T) {
	parallel(t)
	for _, off := range []bool{false, true} {
		for _, mode := range []string{"ud", "rc"} {
			t.Run(fmt.Sprintf("%s, off %v", mode, off), func(t *testing.T) {
				parallel(t)
				s := newSegment(t, topology{mtu: 1500})
				a, b := s.hosts[0], s.hosts[1]
				for _, h := range s.hosts {
					h.run(h.config(fmt.Sprintf("mode: %s\nreceive_mtu: 4000\noffload: {tso: %v}\n", mode, !off))...)
				}
				if mode == "rc" {
					a.connect(b, "RC")
				}
				// How long TCP's pieces are depends on how fast it gets on, and on a busy machine they are
				// of two packets. Reno's first piece is long, if the kernel is asked for that.
				s.must(a.Sysctl("net/ipv4/tcp_congestion_control", "reno"))
				s.must(a.Sysctl("net/ipv4/tcp_min_tso_segs", "16"))
				both(b, a.reach)
				both(b, func(dst netip.Addr) {
					_, err := a.Send(s.ctx, b.Host, dst, 20_000, 0)
					s.must(err)
				})
				if split, packets := a.counter("tun", "pieces_split"), a.counter("tun", "packets_split"); off != (split == 0) ||
					packets < 4*split {
					t.Errorf("%d pieces split into %d packets", split, packets)
				}
				both(b, func(dst netip.Addr) { a.send(b, dst, 16<<20) })
				if merged := b.counter("tun", "pieces_merged"); off != (merged == 0) {
					t.Errorf("%d packets merged into %d pieces", b.counter("tun", "packets_merged"), merged)
				}
				for _, h := range s.hosts {
					if n := h.counter("tun", "drop_gso_malformed") + h.counter("tun", "drop_checksum_range") + h.counter("tun",
						"checksums_wrong"); n != 0 {
						t.Errorf("%s: %d packets dropped or wrong", h.Name, n)
					}
				}
			})
		}
	}
}
