package interop

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"ipoibcm/ib"
	"ipoibcm/serviceid"
	"ipoibcm/test/interop/judge"
	"ipoibcm/wire/mad"
)

// A oneWayWatch looks at a capture for requests of ours (SEND, WRITE, READ) on connections which
// Linux opened, by a REQ for a service ID of the older form: those are for its packets only.
type oneWayWatch struct {
	theirs map[farQP]bool // QPs of Linux that stand for such a connection
	opened int
	sent   int // requests of ours elsewhere
	wrong  []string
}

// A farQP is a QP of a host.
type farQP struct {
	host netip.Addr
	qpn  ib.QPN
}

func newOneWayWatch() *oneWayWatch { return &oneWayWatch{theirs: map[farQP]bool{}} }

// Octets of headers behind the UDP header, and of the QPN in the BTH.
const (
	bthLen, dethLen = 12, 8
	bthQPN          = 5
)

// isLinux tells guests with ib_ipoib from our host by the port's name.
func isLinux(port string) bool { return strings.HasPrefix(port, "linux") }

// request returns the QP that an RC request of ours is for.
func (w *oneWayWatch) request(from string, frame []byte) (to farQP, ok bool) {
	ip, _, ok := judge.RoCE(frame)
	h, _ := judge.Base(frame)
	if !ok || isLinux(from) || h.Opcode > opReadRequest {
		return farQP{}, false
	}
	return farQP{netip.AddrFrom16([16]byte(ip[24:40])), ib.QPN(h.QPN)}, true
}

// see takes in the next packet.
func (w *oneWayWatch) see(from string, frame []byte) {
	if to, ok := w.request(from, frame); ok {
		if w.theirs[to] {
			w.wrong = append(w.wrong, fmt.Sprintf("a packet of ours on the connection that %v opened with its QPN %v",
				to.host, to.qpn))
		} else {
			w.sent++
		}
		return
	}
	ip, n, ok := judge.RoCE(frame)
	if h, _ := judge.Base(frame); !ok || !isLinux(from) || h.QPN != 1 || len(ip) < n+bthLen+dethLen {
		return
	}
	_, m, err := mad.Parse(ip[n+bthLen+dethLen : len(ip)-4])
	if err != nil {
		return
	}
	host := netip.AddrFrom16([16]byte(ip[8:24]))
	switch m := m.(type) {
	case mad.REQ:
		if form, _ := serviceid.Parse(m.ServiceID); form == serviceid.Legacy {
			if q := (farQP{host, m.LocalQPN}); !w.theirs[q] {
				w.theirs[q] = true
				w.opened++
			}
		}
	case mad.REP: // the QP has another use now
		delete(w.theirs, farQP{host, m.LocalQPN})
	}
}

// redirected returns a packet of ours with another QPN in it: that of a connection which Linux
// opened.
func (w *oneWayWatch) redirected(from string, frame []byte) ([]byte, bool) {
	to, ok := w.request(from, frame)
	if !ok {
		return nil, false
	}
	for q := range w.theirs {
		if q.host == to.host {
			f := slices.Clone(frame)
			ip, n, _ := judge.RoCE(f)
			copy(ip[n+bthQPN:], []byte{byte(q.qpn >> 16), byte(q.qpn >> 8), byte(q.qpn)})
			return f, true
		}
	}
	return nil, false
}
