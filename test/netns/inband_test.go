package netns

import (
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"ipoibcm/control"
	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/internal/lab"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
)

// cmMessages counts the CM messages of a capture, by path and kind, and checks
// what carries the ones in-band.
func cmMessages(t *testing.T, frames []frame, links map[netip.Addr]ib.QPN) (gsi, inband map[mad.AttrID]int) {
	t.Helper()
	gsi, inband = map[mad.AttrID]int{}, map[mad.AttrID]int{}
	for _, f := range frames {
		if f.BTH.DestQPN() == ib.QPNGSI {
			if h, _, err := mad.Parse(f.Payload); err == nil {
				gsi[h.Attr]++
			}
			continue
		}
		typ, inner, ok := f.ipoib()
		if !ok || typ != encap.InbandCM {
			continue
		}
		h, msg, err := mad.Parse(inner)
		if err != nil {
			t.Errorf("in-band from %s to %s: %v", f.src, f.dst, err)
			continue
		}
		expect.Equal(t, len(inner), verbs.MADLen, "in-band from %s to %s: octets of the message", f.src, f.dst)
		expect.Equal(t, f.transport, ib.UD, "in-band from %s to %s: transport", f.src, f.dst)
		expect.Equal(t, f.DETH().SrcQPN(), links[f.src], "in-band from %s to %s: source QPN", f.src, f.dst)
		expect.Equal(t, f.BTH.DestQPN(), links[f.dst], "in-band from %s to %s: destination QPN", f.src, f.dst)
		if req, ok := msg.(mad.REQ); ok && req.Primary.LocalGID.Addr() != f.src {
			t.Errorf("REQ of %v in a packet from %s", req.Primary.LocalGID, f.src)
		}
		inband[h.Attr]++
	}
	return gsi, inband
}

func (s *segment) links() map[netip.Addr]ib.QPN {
	s.Helper()
	links := map[netip.Addr]ib.QPN{}
	for _, h := range s.hosts {
		i := h.status().Interface
		q, err := parseQPN(i.UDQPN)
		s.must(err)
		links[netip.MustParseAddr(i.GID)] = q
	}
	return links
}

// counted checks that a counter of the protocol is not zero.
func (h *host) counted(name string) {
	h.seg.Helper()
	if h.counter("ipoib", name) == 0 {
		h.seg.Errorf("%s of %s is 0, want more", name, h.Name)
	}
}

// Two agents of which one or both leave QP 1 alone are connected all the same,
// by messages in-band, which every way of looking in shows.
func TestCMInband(t *testing.T) {
	parallel(t)
	for _, tt := range []struct {
		name, mode string
		a, b       string // cm_transport
	}{
		{"both", "rc", "inband", "inband"},
		{"both, UC", "uc", "inband", "inband"},
		{"asked by the one that would", "rc", "auto", "inband"},
		{"asked by the one that must", "rc", "inband", "auto"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			parallel(t)
			s, a, b := newPair(t)
			a.run("--mode", tt.mode, "--cm-transport", tt.a)
			b.run("--mode", tt.mode, "--cm-transport", tt.b)
			seen := a.capture()
			monitor := a.follow("monitor", "--control", a.path(".sock"))
			want := map[string]string{"rc": "RC", "uc": "UC"}[tt.mode]
			mine, theirs := a.connect(b, want)
			expect.Equal(t, mine.CMPath, "inband", "CMPath")
			expect.Equal(t, theirs.CMPath, "inband", "CMPath")
			expect.Equal(t, mine.MTU, maxMTU, "MTU")
			both(b, func(dst netip.Addr) {
				a.reach(dst)
				a.ping(dst, maxMTU, true)
			})
			if mine.Mode == "RC" {
				a.send(b, b.v4, 8<<20)
			}
			links := s.links()
			s.eventually(patience, "the capture has the handshake", func() error {
				gsi, inband := cmMessages(t, seen.frames(), links)
				for _, m := range []mad.AttrID{mad.AttrREQ, mad.AttrREP, mad.AttrRTU} {
					if inband[m] == 0 {
						return fmt.Errorf("no %v in-band: %v", m, inband)
					}
				}
				// A REQ of the one that would use QP 1 may cross the other's.
				if gsi[mad.AttrREP] > 0 || tt.a == tt.b && len(gsi) > 0 {
					return fmt.Errorf("at QP 1: %v", gsi)
				}
				return nil
			})
			a.counted("inband_sent")
			b.counted("inband_received")
			b.counted("inband_established")
			a.saysInband(b, tt.a)
			b.stop() // says goodbye in-band
			a.noConns()
			s.eventually(patience, "goodbye", func() error {
				if _, inband := cmMessages(t, sentOnce(seen.frames()), links); inband[mad.AttrDREQ] != 1 || inband[mad.AttrDREP] != 1 {
					return fmt.Errorf("%v", inband)
				}
				return nil
			})
			s.eventually(patience, "the monitor tells", func() error {
				return containsAll(strings.Join(monitor.output(), "\n"), "DREQ in-band", "DREP in-band")
			})
		})
	}
}

// saysInband: status, explain and the connections say that CM messages go in-band.
func (a *host) saysInband(b *host, transport string) {
	t := a.seg
	t.Helper()
	for _, look := range []struct{ args, want []string }{
		{[]string{"status"}, []string{"CM messages", transport, "inband"}},
		{[]string{"explain", b.v4.String()}, []string{"in-band", "extension to RFC 4755"}},
		{[]string{"show", "conn"}, []string{"inband"}},
	} {
		out, code := a.command(append(look.args, "--control", a.path(".sock"))...)
		if err := containsAll(out, look.want...); err != nil || code != 0 {
			t.Errorf("%v: %d, %v", look.args, code, err)
		}
	}
	paths := a.status().Interface.CMPaths
	if wantPaths := map[string]string{"auto": "[gsi inband]",
		"inband": "[inband]"}[transport]; fmt.Sprint(paths) != wantPaths {
		t.Errorf("paths %v, want %s", paths, wantPaths)
	}
}

// silenceQP1 has nothing arrive at h's QP 1 (hook "ingress"), or nothing of h at the others' ("egress").
// What it returns ends that.
func (h *host) silenceQP1(hooks ...string) (end func()) {
	s := h.seg
	s.Helper()
	nft, err := exec.LookPath("nft")
	if err != nil {
		s.Skip("nft is not installed: QP 1 cannot be silenced")
	}
	do := func(text string) {
		s.Helper()
		c := exec.Command(nft, "-f", "-")
		c.Stdin = strings.NewReader(text)
		if out, err := h.Output(c); err != nil {
			s.Fatalf("%v: %s", err, out)
		}
	}
	for _, hook := range hooks {
		do(fmt.Sprintf("table netdev qp1 {\n chain %s {\n  type filter hook %[1]s device %q priority 0; policy accept;\n"+
			"  udp dport 4791 @th,104,24 1 counter drop\n }\n}\n", hook, underlay)) // 5 octets into the BTH
	}
	return func() { do("delete table netdev qp1\n") }
}

// Both would use QP 1, but nothing that is sent to b's arrives.
func TestSilentQP1(t *testing.T) {
	parallel(t)
	s, a, b := newPair(t)
	b.silenceQP1("ingress")
	s.start("--mode", "rc")
	a.reach(b.v4)
	var mine control.Conn
	s.eventually(2*patience, "connected", func() error {
		a.Ping(lab.Ping{Dst: b.v4, Timeout: pingWithin}) // the next attempt needs a packet
		cs := a.conns(b)
		if len(cs) != 1 || cs[0].State != "ESTABLISHED" {
			return fmt.Errorf("%+v", cs)
		}
		mine = cs[0]
		return nil
	})
	expect.Equal(t, mine.CMPath, "inband", "CMPath")
	if a.counter("ipoib", "inband_turned_to")+b.counter("ipoib", "inband_turned_to") == 0 {
		t.Error("inband_turned_to is 0 at both, want more at one of them")
	}
	a.ping(b.v4, maxMTU, true)
	// The path is remembered: a new connection needs no waiting.
	before := a.counter("ipoib", "dial_failed")
	b.kill()
	b.run("--mode", "rc", "--cm-transport", "inband")
	a.reach(b.v4)
	s.eventually(2*patience, "connected again", func() error {
		a.Ping(lab.Ping{Dst: b.v4, Timeout: pingWithin})
		if cs := a.conns(b); len(cs) != 1 || cs[0].State != "ESTABLISHED" || cs[0].CMPath != "inband" {
			return fmt.Errorf("%+v", cs)
		}
		return nil
	})
	t.Logf("attempts that failed: %d, then %d", before, a.counter("ipoib", "dial_failed"))
}

// One uses QP 1 only and the other never: they stay on UD, and both say why.
func TestNoCMPathInCommon(t *testing.T) {
	parallel(t)
	s, a, b := newPair(t)
	a.run("--cm-transport", "gsi")
	b.run("--cm-transport", "inband")
	both(b, a.reach)
	s.eventually(patience, "attempts fail", func() error {
		for _, h := range s.hosts {
			if h.counter("ipoib", "dial_failed") == 0 {
				return fmt.Errorf("%s still tries", h.Name)
			}
		}
		return nil
	})
	a.counted("drop_inband_off") // what came on the path that is off
	b.counted("drop_gsi_off")
	both(b, func(dst netip.Addr) { a.ping(dst, udMTU, true) })
	s.eventually(patience, "explain names the failure", func() error { // another attempt may be under way, or due
		a.Ping(lab.Ping{Dst: b.v4, Timeout: pingWithin})
		if out, _ := a.command("explain", b.v4.String(), "--control", a.path(".sock")); !strings.Contains(out,
			"UD, because the last attempt failed") {
			return fmt.Errorf("explained as:\n%s", out)
		}
		return nil
	})
}
