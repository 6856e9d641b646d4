package softroce

import (
	"fmt"
	"sync/atomic"
	"testing"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// RC packets leave ECN-capable, UC packets, whose sender reacts to nothing, do not. A
// mark comes back as a CNP, and is in the completion; silence ends it.
func TestECN(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			a, b := pair(t, f, nil)
			const size = 1000
			rc, uc := newEnd(t, a, ib.RC, 4, size), newEnd(t, a, ib.UC, 4, size)
			atRC, atUC := newEnd(t, b, ib.RC, 4, size), newEnd(t, b, ib.UC, 4, size)
			connect(rc, atRC)
			connect(uc, atUC)
			var class atomic.Uint32
			b.SetTap(func(out bool, p []byte) {
				if !out && p[0]>>4 == 4 {
					class.Store(uint32(p[1]))
				} else if !out {
					class.Store(uint32(p[0]<<4 | p[1]>>4))
				}
			})
			send := func(from, to *end) verbs.WC {
				_, err := to.qp.PostRecv([]verbs.RecvWR{{SG: to.sge(0, size)}})
				must(t, err)
				_, err = from.qp.PostSend([]verbs.SendWR{{SG: from.sge(0, size)}})
				must(t, err)
				return to.next()
			}
			check := func(what string, wc verbs.WC, ecn uint32) {
				t.Helper()
				if got := class.Load(); got != ecn {
					t.Errorf("%s: traffic class %d, want %d", what, got, ecn)
				}
				if got := wc.Flags&verbs.WithCE != 0; got != (ecn == ecnCE) {
					t.Errorf("%s: the completion says marked %v", what, got)
				}
			}
			check("UC", send(uc, atUC), 0)
			check("RC", send(rc, atRC), ecnECT0)
			p := rc.qp.path
			p.sender.mu.Lock()
			p.attr.TrafficClass |= ecnCE // as a switch does
			p.bind()
			p.sender.mu.Unlock()
			check("RC, marked", send(rc, atRC), ecnCE)
			until(t, "a CNP", func() bool { return counter(a, "rc_cnps_in") == 1 })
			p.withoutECN()
			check("RC without ECN", send(rc, atRC), 0)
			if n := counter(a, "tx_ecn_off"); n != 1 {
				t.Errorf("%d paths without ECN are counted, want 1", n)
			}
		})
	}
}

// There are enough source ports for a fabric to spread connections by.
func TestSourcePorts(t *testing.T) {
	a, _ := pair(t, families[0], nil)
	ports := map[string]bool{}
	for _, s := range a.senders4 {
		ports[fmt.Sprint(s.port)] = true
		if s.port < 0xc000 {
			t.Errorf("source port %d, want 0xc000 or above", s.port)
		}
	}
	if len(ports) < 64 {
		t.Errorf("%d source ports, want 64", len(ports))
	}
}
