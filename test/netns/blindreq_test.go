package netns

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"ipoibcm/control"
	"ipoibcm/ib"
	"ipoibcm/internal/lab"
	"ipoibcm/serviceid"
	"ipoibcm/wire/mad"
	"ipoibcm/wire/roce"
	"ipoibcm/wire/roce/rocetest"
)

// newUnmetLiar returns a liar to a victim that has not met the peer. It is the third host.
func newUnmetLiar(s *segment, victim, peer *host) *blindLiar {
	s.Helper()
	l := &blindLiar{victim: victim, peer: peer, peerGID: netip.MustParseAddr(peer.status().Interface.GID),
		forger: s.forger(s.hosts[2], victim)}
	l.r = rand.New(rand.NewPCG(4791, uint64(l.forger.qpn)))
	l.guid = ib.GUID(l.r.Uint64())
	return l
}

// TestBlindForm: two hosts that have not met, and a liar asks one of them in the name of the other, with
// Linux's service ID and all else as the other would. They meet as RFC 4755 has it nevertheless.
func TestBlindForm(t *testing.T) {
	parallel(t)
	s := newSegment(t, topology{hosts: 3})
	victim, peer := s.hosts[0], s.hosts[1]
	victim.run()
	peer.run()
	l := newUnmetLiar(s, victim, peer)
	asked := victim.counter("ipoib", "cm_rx_req")
	l.tell(60, l.legacyREQs(30)...)
	if got := victim.counter("ipoib", "cm_rx_req") - asked; got == 0 {
		t.Fatal("no forged REQ arrived: this shows nothing")
	}
	victim.reach(peer.v4)
	if got, want := victim.firstClass(), "peer class is rfc"; !strings.HasPrefix(got, want) {
		t.Errorf("what %s notes first is %q, want %q", victim.Name, got, want)
	}
	victim.pairedBy(peer, "RC", func() { _, _ = victim.Ping(lab.Ping{Dst: peer.v4, Timeout: 100 * time.Millisecond}) })
}

// TestBlindOtherForm: the victim has seen a connection of the peer of Linux's form, and a liar asks it in the
// peer's name with the form of RFC 4755, 60 times a second and while the victim sets up its own connection. That
// takes one REQ, of Linux's form, beside the liar and without; a connection that is there lives. The peer is an
// agent: it takes that REQ as a kernel would, and would show what it is if it had anything to send, so it has not.
func TestBlindOtherForm(t *testing.T) {
	parallel(t)
	const rounds, perSecond = 5, 60
	s := newSegment(t, topology{hosts: 3})
	victim, peer := s.hosts[0], s.hosts[1]
	for _, h := range s.hosts[:2] {
		h.run(h.config("idle_timeout: 1s\n")...)
	}
	heard := peer.listenCM()
	l := newUnmetLiar(s, victim, peer)
	l.proveLegacy(heard)
	say := victim.saysOnly(peer)
	var took [2][]time.Duration
	for i := range 2 * rounds {
		s.eventually(patience, "the connection has ended", func() error {
			if n := len(victim.sendsOn(peer)); n > 0 {
				return fmt.Errorf("%d are there", n)
			}
			return nil
		})
		setUp := func() { took[i%2] = append(took[i%2], l.setUp(heard, say)) }
		if i%2 == 0 {
			setUp()
			continue
		}
		asked := victim.counter("ipoib", "cm_rx_req")
		l.tell(perSecond, l.reqs(perSecond/2)...)
		if got := victim.counter("ipoib", "cm_rx_req") - asked; got == 0 {
			t.Fatal("no forged REQ arrived: this shows nothing")
		}
		l.tellBeside(perSecond, l.reqs(perSecond/2), setUp)
	}
	t.Logf("a datagram until the RTU that it leads to: %v, beside forged REQs %v", took[0], took[1])

	var was, now []control.Conn
	l.tellBeside(perSecond, l.reqs(perSecond), func() {
		s.eventually(patience, "there is a connection", func() error {
			say()
			if was = victim.sendsOn(peer); len(was) != 1 {
				return fmt.Errorf("there are %d", len(was))
			}
			return nil
		})
		for range 100 {
			say()
		}
		now = victim.sendsOn(peer)
	})
	if len(now) != 1 {
		t.Fatalf("%d connections to send on, want 1", len(now))
	}
	if now[0].LocalCommID != was[0].LocalCommID {
		t.Errorf("sends on %s, before on %s", now[0].LocalCommID, was[0].LocalCommID)
	}
	if n := now[0].TxPackets - was[0].TxPackets; n < 90 { // the counts are reported now and then
		t.Errorf("%d of 100 datagrams went on the connection", n)
	}
}

// TestBlindFormBesideLegacy: the victim has a connection of Linux's form from the peer, and one to it. A liar asks it in
// the peer's name with that form, 60 times a second. Both connections live, and the victim's carries what it says. The
// peer is an agent, as in TestBlindOtherForm.
func TestBlindFormBesideLegacy(t *testing.T) {
	parallel(t)
	const perSecond, places = 60, 4
	s := newSegment(t, topology{hosts: 3})
	victim, peer := s.hosts[0], s.hosts[1]
	victim.run()
	peer.run()
	l := newUnmetLiar(s, victim, peer)
	l.proveLegacy(peer.listenCM())
	say := victim.saysOnly(peer)
	s.eventually(patience, "there is a connection", func() error {
		say()
		if n := len(victim.sendsOn(peer)); n != 1 {
			return fmt.Errorf("there are %d to send on", n)
		}
		return nil
	})
	was := victim.conns(peer)
	if len(was) != 2 {
		t.Fatalf("%d connections, want 2: %+v", len(was), was)
	}
	sent := victim.sendsOn(peer)[0].TxPackets
	asked, most := victim.counter("ipoib", "cm_rx_req"), 0
	l.tellBeside(perSecond, l.legacyREQs(3*perSecond), func() {
		for range 100 {
			say()
			most = max(most, len(s.connsOf(victim)))
			time.Sleep(30 * time.Millisecond)
		}
	})
	if got := victim.counter("ipoib", "cm_rx_req") - asked; got == 0 {
		t.Fatal("no forged REQ arrived: this shows nothing")
	}
	if most != 1+places {
		t.Errorf("up to %d connections, want %d: the victim's, the peer's and forged ones", most, 1+places)
	}
	now := victim.conns(peer)
	for _, c := range was {
		if !slices.ContainsFunc(now, func(n control.Conn) bool { return n.LocalCommID == c.LocalCommID && n.State == c.State }) {
			t.Errorf("the %s connection %s has ended", c.Direction, c.LocalCommID)
		}
	}
	if on := victim.sendsOn(peer); len(on) != 1 {
		t.Errorf("%d connections to send on, want 1", len(on))
	} else if n := on[0].TxPackets - sent; n < 90 { // the counts are reported now and then
		t.Errorf("%d of 100 datagrams went on the connection", n)
	}
}

// saysOnly opens a socket at peer that answers nothing. What it returns sends it a datagram, which must arrive. The kernel
// drops packets beside floods, those of other tests too, so it is sent up to twenty times in ten seconds.
func (h *host) saysOnly(peer *host) func() {
	s := h.seg
	s.Helper()
	to := net.UDPAddrFromAddrPort(netip.AddrPortFrom(peer.v4, 9))
	var in, out *net.UDPConn
	s.must(peer.Do(func() (err error) { in, err = net.ListenUDP("udp4", to); return err }))
	s.Cleanup(func() { in.Close() })
	s.must(h.Do(func() (err error) { out, err = net.DialUDP("udp4", nil, to); return err }))
	s.Cleanup(func() { out.Close() })
	return func() {
		s.Helper()
		var err error
		for range 20 {
			_, err = out.Write(make([]byte, 1000))
			s.must(err)
			s.must(in.SetReadDeadline(time.Now().Add(pingWithin)))
			if _, err = in.Read(make([]byte, 2000)); err == nil {
				return
			}
		}
		s.Fatalf("%s does not reach %s: %v", h.Name, peer.Name, err)
	}
}

// reqs makes REQs that the peer might send.
func (l *blindLiar) reqs(n int) (reqs []mad.Message) {
	for range n {
		reqs = append(reqs, l.req(ib.QPN(2+l.r.Uint32N(1<<24-3))))
	}
	return reqs
}

// legacyREQs makes REQs that the peer might send if it were of Linux's kind.
func (l *blindLiar) legacyREQs(n int) (reqs []mad.Message) {
	for _, m := range l.reqs(n) {
		req := m.(mad.REQ)
		req.ServiceID = serviceid.New(serviceid.Legacy, l.forger.qpn)
		reqs = append(reqs, req)
	}
	return reqs
}

// proveLegacy plays the peer: it opens a connection of Linux's form in its name, and is told what the
// victim answers.
func (l *blindLiar) proveLegacy(heard func() []heardCM) {
	s := l.victim.seg
	s.Helper()
	req := l.legacyREQs(1)[0].(mad.REQ)
	l.tell(1000, req)
	s.eventually(patience, "the victim answers", func() error {
		for _, h := range heard() {
			if rep, ok := h.msg.(mad.REP); ok && rep.RemoteCommID == req.LocalCommID {
				l.tell(1000, mad.RTU{TransactionID: req.TransactionID, LocalCommID: req.LocalCommID, RemoteCommID: rep.LocalCommID})
				return nil
			}
		}
		return errors.New("it has not")
	})
	if got, want := l.victim.firstClass(), "peer class is legacy"; !strings.HasPrefix(got, want) {
		s.Fatalf("what %s notes first is %q, want %q", l.victim.Name, got, want)
	}
}

// setUp has the victim connect by what it says, which must take one REQ of Linux's form, and returns how long
// that takes to lead to an RTU.
func (l *blindLiar) setUp(heard func() []heardCM, say func()) (took time.Duration) {
	s := l.victim.seg
	s.Helper()
	before, begin := len(heard()), time.Now()
	say()
	s.eventually(patience, "there is a connection", func() error {
		var asked []mad.CommID
		for _, h := range heard()[before:] {
			switch m := h.msg.(type) {
			case mad.REQ:
				if m.Primary.LocalGID != ib.GIDFromAddr(l.gid) {
					continue
				}
				if form, _ := serviceid.Parse(m.ServiceID); form != serviceid.Legacy {
					s.Fatalf("the victim asks with service ID %#016x, want Linux's form", m.ServiceID)
				}
				if slices.Contains(asked, m.LocalCommID) {
					continue // sent again, because the REP is late
				}
				if asked = append(asked, m.LocalCommID); len(asked) > 1 {
					s.Fatalf("the victim has sent %d different REQs, want 1", len(asked))
				}
			case mad.RTU:
				if slices.Contains(asked, m.LocalCommID) {
					took = h.at.Sub(begin)
					return nil
				}
			}
		}
		return fmt.Errorf("no RTU, %d REQs", len(asked))
	})
	return took.Round(10 * time.Microsecond)
}

// sendsOn returns the established connections that h sends to peer on.
func (h *host) sendsOn(peer *host) []control.Conn {
	h.seg.Helper()
	return slices.DeleteFunc(h.conns(peer), func(c control.Conn) bool { return c.Direction == "receive" })
}

// A heardCM is a CM message that went by.
type heardCM struct {
	at  time.Time
	msg mad.Message
}

// listenCM listens to what the underlay of h sends to QP 1s, and takes. What it returns tells the messages
// since.
func (h *host) listenCM() func() []heardCM {
	h.seg.Helper()
	var mu sync.Mutex
	var all []heardCM
	h.sniff(1<<16, func(frame []byte) {
		if m := cmIn(frame); m != nil {
			mu.Lock()
			all = append(all, heardCM{time.Now(), m})
			mu.Unlock()
		}
	})
	return func() []heardCM {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(all)
	}
}

// cmIn returns the CM message in a frame, nil if there is none.
func cmIn(frame []byte) mad.Message {
	if len(frame) < etherLen {
		return nil
	}
	var p roce.Packet
	_, payload, err := rocetest.ParseIP(frame[etherLen:])
	if err != nil || p.Parse(payload) != nil || p.BTH.DestQPN() != ib.QPNGSI {
		return nil
	}
	_, m, _ := mad.Parse(p.Payload)
	return m
}

// firstClass waits for the event that says first which conventions a peer follows.
func (h *host) firstClass() string {
	s := h.seg
	s.Helper()
	ctx, stop := context.WithTimeout(s.ctx, patience)
	defer stop()
	body, err := h.agent.Stream(ctx, control.PathEvents+"?since=1m")
	s.must(err)
	defer body.Close()
	for d := json.NewDecoder(body); ; {
		var e control.Event
		s.must(d.Decode(&e))
		if strings.HasPrefix(e.Text, "peer class is") {
			return e.Text
		}
	}
}
