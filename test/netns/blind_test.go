package netns

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os/exec"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/cm"
	"ipoibcm/control"
	"ipoibcm/ib"
	"ipoibcm/internal/lab"
	"ipoibcm/serviceid"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
	"ipoibcm/wire/roce"
	"ipoibcm/wire/sums"
)

// A blindLiar is a host that sends a victim what its peer might have sent. It sees
// nothing of theirs; what else it knows the test has told it.
type blindLiar struct {
	*forger
	victim, peer *host
	peerGID      netip.Addr
	was          control.Conn // the connection, as the victim has it
	local, remote,
	qpn, peerQPN uint32
	guid ib.GUID // the peer's
}

// newBlindLiar connects the first two hosts; the third is the liar. Of further arguments the first half is the
// victim's.
func newBlindLiar(s *segment, args ...string) *blindLiar {
	s.Helper()
	victim, peer, x := s.hosts[0], s.hosts[1], s.hosts[2]
	victim.run(args[:len(args)/2]...)
	peer.run(args[len(args)/2:]...)
	heard := peer.hearMADs()
	l := &blindLiar{victim: victim, peer: peer}
	l.was, _ = victim.connect(peer, "RC")
	for name, of := range map[string]*uint32{l.was.LocalCommID: &l.local, l.was.RemoteCommID: &l.remote,
		l.was.LocalQPN: &l.qpn, l.was.RemoteQPN: &l.peerQPN} {
		_, err := fmt.Sscanf(name, "0x%x", of)
		s.must(err)
	}
	l.peerGID = netip.MustParseAddr(peer.status().Interface.GID)
	l.guid = heard(mad.CommID(l.remote))
	l.forger = s.forger(x, victim)
	l.r = rand.New(rand.NewPCG(4791, uint64(l.local)))
	return l
}

// hearMADs listens to what h sends to QP 1. What it returns tells the CA GUID in the
// REQ or REP with a communication ID.
func (h *host) hearMADs() func(mad.CommID) ib.GUID {
	s := h.seg
	s.Helper()
	fd := h.packetSocket()
	return func(id mad.CommID) ib.GUID {
		s.Helper()
		b := make([]byte, 1<<16)
		for {
			n, err := unix.Read(fd, b)
			if errors.Is(err, unix.EAGAIN) {
				s.Fatalf("%s sent no REQ or REP with communication ID %v", h.Name, id)
			}
			s.must(err)
			switch m := cmIn(b[:n]).(type) {
			case mad.REQ:
				if m.LocalCommID == id {
					return m.LocalCAGUID
				}
			case mad.REP:
				if m.LocalCommID == id {
					return m.LocalCAGUID
				}
			}
		}
	}
}

// lives fails unless the connection is the one of before and carries TCP both ways.
func (l *blindLiar) lives(what string) {
	s := l.victim.seg
	s.Helper()
	l.victim.send(l.peer, l.peer.v4, 1<<20)
	l.peer.send(l.victim, l.victim.v4, 1<<20)
	now := l.victim.conns(l.peer)
	if len(now) != 1 {
		s.Fatalf("%s: %d connections, want 1", what, len(now))
	}
	if now[0].LocalCommID != l.was.LocalCommID {
		s.Errorf("%s: the connection has communication ID %s, before %s", what, now[0].LocalCommID, l.was.LocalCommID)
	}
	if now[0].AgeMS < l.was.AgeMS {
		s.Errorf("%s: the connection is %d ms old, before %d ms", what, now[0].AgeMS, l.was.AgeMS)
	}
}

// tell sends the messages to QP 1 of the victim, perSecond of them.
func (l *blindLiar) tell(perSecond int, messages ...mad.Message) {
	l.victim.seg.Helper()
	l.tellBeside(perSecond, messages, func() {})
}

// tellBeside does what tell does while f runs.
func (l *blindLiar) tellBeside(perSecond int, messages []mad.Message, f func()) {
	s := l.victim.seg
	s.Helper()
	var packets [][]byte
	for _, m := range messages {
		b, _ := m.AppendBinary(nil) // the error is always nil
		packets = append(packets, forgedUD(l.r, l.peerGID, l.gid, ib.QPNGSI, ib.QPNGSI, ib.QKeyGSI, b))
	}
	l.load(packets)
	ctx, stop := context.WithTimeout(s.ctx, patience)
	defer stop()
	var sent int
	var err error
	var wg sync.WaitGroup
	defer wg.Wait() // also where f ends the test
	wg.Go(func() { sent, err = l.send(ctx, roce.Port, perSecond) })
	f()
	wg.Wait()
	s.must(err)
	if sent != len(packets) {
		s.Fatalf("%d of %d packets left", sent, len(packets))
	}
}

// TestBlindCM: CM messages in the peer's name of which all is right but one item, which
// is drawn, in a real kernel. The connection goes on.
func TestBlindCM(t *testing.T) {
	parallel(t)
	s := newSegment(t, topology{hosts: 3})
	l := newBlindLiar(s)
	local, remote := mad.CommID(l.local), mad.CommID(l.remote)
	any32 := func() mad.CommID { return mad.CommID(l.r.Uint32()) }
	anyQPN := func() ib.QPN { return ib.QPN(2 + l.r.Uint32N(1<<24-3)) }
	rej4 := func(theirs, ours mad.CommID) mad.REJ {
		rej := mad.REJ{LocalCommID: theirs, RemoteCommID: ours, MessageRejected: mad.KindOther, Reason: cm.ReasonTimeout,
			ARILength: 8}
		binary.BigEndian.PutUint64(rej.ARI[:], uint64(l.guid))
		return rej
	}
	for _, tt := range []struct {
		name string
		make func() mad.Message
	}{
		{"DREQ without the victim's ID", func() mad.Message {
			return mad.DREQ{LocalCommID: remote, RemoteCommID: any32(), RemoteQPN: ib.QPN(l.qpn)}
		}},
		{"DREQ without the peer's ID", func() mad.Message {
			return mad.DREQ{LocalCommID: any32(), RemoteCommID: local, RemoteQPN: ib.QPN(l.qpn)}
		}},
		{"DREQ without the QPN", func() mad.Message {
			return mad.DREQ{LocalCommID: remote, RemoteCommID: local,
				RemoteQPN: anyQPN()}
		}},
		{"DREP", func() mad.Message { return mad.DREP{LocalCommID: remote, RemoteCommID: local} }},
		{"REJ without the victim's ID", func() mad.Message { return rej4(remote, any32()) }},
		{"REJ without the peer's ID", func() mad.Message { return rej4(any32(), local) }},
		{"RTU", func() mad.Message { return mad.RTU{LocalCommID: remote, RemoteCommID: local} }},
		{"MRA", func() mad.Message { return mad.MRA{LocalCommID: remote, RemoteCommID: local, ServiceTimeout: 31} }},
		{"LAP", func() mad.Message { return mad.LAP{LocalCommID: remote, RemoteCommID: local} }},
		{"REP", func() mad.Message {
			return mad.REP{LocalCommID: remote, RemoteCommID: local, LocalQPN: ib.QPN(l.peerQPN), LocalCAGUID: l.guid}
		}},
		{"REQ that names the peer's QP", func() mad.Message { return l.req(ib.QPN(l.peerQPN)) }},
		{"REQ in the peer's name", func() mad.Message { return l.req(anyQPN()) }},
	} {
		perSecond := 250 // what QP 1 takes of one source
		if tt.name[:3] == "REQ" {
			perSecond = 60
		}
		var all []mad.Message
		for range perSecond {
			all = append(all, tt.make())
		}
		l.tell(perSecond, all...)
		l.lives(tt.name)
	}
	if n := l.victim.counter("ipoib", "cm_challenges"); n == 0 {
		t.Error("the peer was never asked whether it has lost the connection: the REQs did not arrive")
	}
}

// TestBlindCNP: CNPs to all QPNs that differ from the right one in their last eight bits, and then to the right one only,
// beside TCP. With a peer of ours, which tells of marks in its ACKs, none has an effect. A peer that does not, as an
// adapter, and ecn: on: they slow the queue pair down, and it goes on.
func TestBlindCNP(t *testing.T) {
	parallel(t)
	const all, perSecond = 256, 1000
	for _, tt := range []struct {
		name         string
		victim, peer string // their ecn
		slows        bool
	}{
		{"one of ours", "auto", "auto", false},
		{"as an adapter", "on", "off", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newSegment(t, topology{hosts: 3})
			l := newBlindLiar(s, "--ecn", tt.victim, "--ecn", tt.peer)
			count := func(name string) uint64 { return l.victim.counter("softroce", name) }
			cnp := func(qpn ib.QPN) []byte {
				b := make([]byte, roce.BTHLen+16) // the rest is reserved
				roce.PutBTH(b, roce.BTHFields{Opcode: roce.CNP, PKey: ib.DefaultPKey, DestQPN: qpn})
				return sealed(l.r, l.peerGID, l.gid, b)
			}
			var guesses, told [][]byte
			for _, low := range l.r.Perm(all) {
				guesses = append(guesses, cnp(ib.QPN(l.qpn&^(all-1)|uint32(low))))
			}
			for range 2 * perSecond {
				told = append(told, cnp(ib.QPN(l.qpn)))
			}
			beside := func(packets [][]byte, d time.Duration) (tcp lab.Transfer) {
				l.load(packets)
				ctx, stop := context.WithTimeout(s.ctx, patience)
				defer stop()
				var err, failed error
				var wg sync.WaitGroup
				wg.Go(func() { _, failed = l.send(ctx, roce.Port, perSecond) })
				tcp, err = l.victim.Send(ctx, l.peer.Host, l.peer.v4, 0, d)
				wg.Wait()
				s.must(err)
				s.must(failed)
				return tcp
			}
			beside(guesses, time.Second)
			if n := count("rc_cnps_in"); n > 1 { // the kernel may drop the right one
				t.Errorf("%d of %d CNPs came in, want 1", n, all)
			}
			without := beside(nil, time.Second)
			before, slowed := count("rc_cnps_in"), count("rc_ce_reductions")
			with := beside(told, 2*time.Second)
			in, slows := count("rc_cnps_in")-before, count("rc_ce_reductions")-slowed
			if in == 0 {
				t.Fatal("no CNP came in: this shows nothing")
			}
			if (slows > 0) != tt.slows {
				t.Errorf("%d CNPs of %d had an effect, want some: %v", slows, in, tt.slows)
			}
			if !tt.slows {
				s.eventually(patience, "all CNPs are ignored", func() error { // the last ones may be between two looks
					if in, ignored := count("rc_cnps_in"), count("rc_cnps_ignored"); ignored != in {
						return fmt.Errorf("%d of %d", ignored, in)
					}
					return nil
				})
			}
			l.lives("CNPs")
			t.Logf("%d CNPs, of which %d had an effect: %.0f Mb/s, without %.0f", in, slows, with.Mbps(), without.Mbps())
		})
	}
}

// TestBlindAnswers: a REQ is out, and the peer does not hear it. A liar sends what might answer it, with
// all communication IDs that differ in their last eight bits, in a drawn order: one is believed. REJ
// and MRA leave UD as it is; a REP makes a connection that leads nowhere, which is found out.
func TestBlindAnswers(t *testing.T) {
	parallel(t)
	const all = 256
	s := newSegment(t, topology{hosts: 3})
	victim, peer := s.hosts[0], s.hosts[1]
	victim.run("--cm-transport", "gsi", "--mode", "rc")
	peer.run("--cm-transport", "gsi", "--mode", "rc")
	for _, tt := range []struct {
		name string
		make func(l *blindLiar, id mad.CommID) mad.Message
		took func(after control.Conn) bool // of the connection with that ID, if there is one
	}{
		{"REJ", func(l *blindLiar, id mad.CommID) mad.Message {
			return mad.REJ{LocalCommID: mad.CommID(l.r.Uint32()), RemoteCommID: id, MessageRejected: mad.KindREQ,
				Reason: cm.ReasonNoResources}
		}, func(after control.Conn) bool { return after.State == "" }},
		{"MRA", func(l *blindLiar, id mad.CommID) mad.Message {
			return mad.MRA{LocalCommID: mad.CommID(l.r.Uint32()), RemoteCommID: id, MessageMRAed: mad.KindREQ,
				ServiceTimeout: 20}
		}, func(after control.Conn) bool { return after.State == "MRA_REQ_RCVD" }},
		{"REP", func(l *blindLiar, id mad.CommID) mad.Message {
			rep := mad.REP{LocalCommID: mad.CommID(l.r.Uint32()), RemoteCommID: id, LocalQPN: 2 + ib.QPN(l.r.Uint32N(1<<24-3)),
				StartingPSN: ib.PSN(l.r.Uint32N(1 << 24)), LocalCAGUID: ib.GUID(l.r.Uint64()), RNRRetryCount: 7, SRQ: true}
			pd, _ := encap.PrivateData{QPN: ib.QPN(l.peerQPN), ReceiveMTU: 65524}.AppendBinary(nil)
			copy(rep.PrivateData[:], pd)
			return rep
		}, func(after control.Conn) bool { return after.State == "ESTABLISHED" }},
	} {
		speaks := peer.silenceQP1("ingress", "egress") // so that it is the victim who asks
		if len(s.connsOf(victim)) > 0 {                // the peer has dialled since the last round
			victim.down()
		}
		var req control.Conn
		dropped := uint64(all)
		for try := 0; dropped == all && try < 5; try++ { // a REQ is out for 3 s only
			var l *blindLiar
			l, req = newAskingLiar(s, victim, peer)
			var messages []mad.Message
			for _, low := range l.r.Perm(all) {
				messages = append(messages, tt.make(l, mad.CommID(l.local&^(all-1)|uint32(low))))
			}
			before := victim.counter("ipoib", "cm_drop_unknown_conn")
			l.tell(200, messages...)
			s.eventually(patience, "all are counted", func() error {
				if dropped = victim.counter("ipoib", "cm_drop_unknown_conn") - before; dropped < all-1 {
					return fmt.Errorf("%d of %d", dropped, all-1)
				}
				return nil
			})
		}
		if dropped != all-1 {
			t.Errorf("%s: %d of %d were for no connection, want %d", tt.name, dropped, all, all-1)
		}
		if after := victim.connWith(req.LocalCommID); !tt.took(after) {
			t.Errorf("%s: the connection was %+v, is %+v", tt.name, req, after)
		}
		speaks()
		begin := time.Now()
		victim.reach(peer.v4)
		t.Logf("%s: one of %d was believed; a ping is answered %v later", tt.name, all,
			time.Since(begin).Round(time.Millisecond))
		victim.down()
	}
}

// newAskingLiar returns a liar that knows all of a REQ of the victim, which has just left.
func newAskingLiar(s *segment, victim, peer *host) (l *blindLiar, req control.Conn) {
	s.Helper()
	l = &blindLiar{victim: victim, peer: peer, peerGID: netip.MustParseAddr(peer.status().Interface.GID),
		forger: s.forger(s.hosts[2], victim)}
	l.r = rand.New(rand.NewPCG(4791, victim.counter("ipoib", "req_sent")))
	qpn, err := parseQPN(peer.status().Interface.UDQPN)
	s.must(err)
	l.peerQPN = uint32(qpn)
	s.eventually(patience, "a REQ is out", func() error {
		_, _ = victim.Ping(lab.Ping{Dst: peer.v4, Timeout: 10 * time.Millisecond})
		for _, c := range s.connsOf(victim) {
			if c.State == "REQ_SENT" && c.AgeMS < 300 && c.LocalCommID != "" {
				req = c
				return nil
			}
		}
		return errors.New("none is")
	})
	_, err = fmt.Sscanf(req.LocalCommID, "0x%x", &l.local)
	s.must(err)
	return l, req
}

// connWith returns the connection with a communication ID of ours, a zero one if there is none.
func (h *host) connWith(id string) (conn control.Conn) {
	for _, c := range h.seg.connsOf(h) {
		if c.LocalCommID == id {
			conn = c
		}
	}
	return conn
}

// down ends all connections of the interface, whose state is forgotten with them.
func (h *host) down() {
	s := h.seg
	s.Helper()
	s.must(h.Sysctl("net/ipv6/conf/"+ifName+"/keep_addr_on_down", "1"))
	s.must(h.Down(ifName))
	h.noConns()
	s.must(h.Up(ifName))
	h.waitState("up")
}

// req makes a REQ that the peer might send.
func (l *blindLiar) req(qpn ib.QPN) mad.REQ {
	req := mad.REQ{TransactionID: l.r.Uint64(), LocalCommID: mad.CommID(l.r.Uint32()),
		ServiceID:   serviceid.New(serviceid.RFC, l.forger.qpn),
		LocalCAGUID: l.guid, LocalQPN: qpn, RemoteCMResponseTimeout: 16, LocalCMResponseTimeout: 16,
		Transport: ib.RC, StartingPSN: ib.PSN(l.r.Uint32N(1 << 24)), RetryCount: 7, RNRRetryCount: 7, PKey: ib.DefaultPKey,
		PathMTU: ib.MTU1024, MaxCMRetries: 15, SRQ: true}
	req.Primary = mad.PathInfo{LocalLID: ib.PermissiveLID, RemoteLID: ib.PermissiveLID,
		LocalGID: ib.GIDFromAddr(l.peerGID), RemoteGID: ib.GIDFromAddr(l.gid),
		HopLimit: 64, LocalACKTimeout: 14}
	udQPN, err := parseQPN(l.peer.status().Interface.UDQPN)
	l.victim.seg.must(err)
	pd, _ := encap.PrivateData{QPN: udQPN, ReceiveMTU: 65524}.AppendBinary(nil)
	copy(req.PrivateData[:], pd)
	return req
}

// blindNAKs are the NAKs of TestBlindNAK.
var blindNAKs = []roce.Syndrome{roce.NAKInvalidReq, roce.NAKRemoteAccess, roce.NAKRemoteOp, roce.NAKSequence,
	roce.RNRSyndrome(1)}

// TestBlindNAK: NAKs of all kinds for the right QPN beside TCP. One liar is told the MSN and all of
// the PSN but the last twelve bits; without QPN, MSN and PSN there would be 2^60 as many to send. Each
// fatal NAK of its that was right is found out. The other is told all of the PSN, and draws the MSN of NAKs, and of
// ACKs for packets that get lost: nothing of its is believed. The connection goes on.
func TestBlindNAK(t *testing.T) {
	parallel(t)
	const unknownPSN = 12
	s := newSegment(t, topology{hosts: 3})
	l := newBlindLiar(s)
	psn, msn := l.peer.watch(ib.QPN(l.peerQPN), ib.QPN(l.qpn)) // who does not see what is forged
	asked := func() uint64 { return l.victim.counter("softroce", "rc_naks_challenged") }
	l.meet("NAKs", "rc_naks_challenged", blindNAKs, func() (ib.PSN, uint32) {
		return ib.PSN(psn.Load())&^(1<<unknownPSN-1) | ib.PSN(l.r.Uint32N(1<<unknownPSN)), msn.Load() + l.r.Uint32N(32)
	})
	if lies := l.victim.counter("softroce", "rc_naks_false"); asked() != lies {
		t.Errorf("%d NAKs were challenged, %d found to be false", asked(), lies)
	}

	before := asked()
	l.drawMSN("NAK", blindNAKs, psn, msn)
	if n := asked() - before; n != 0 {
		t.Errorf("%d NAKs with a drawn MSN were challenged, want 0", n)
	}
	if _, err := exec.LookPath("nft"); err != nil {
		t.Log("nft is not installed: no packet is lost beside the ACKs")
	} else {
		s.must(l.peer.Lose(underlay, l.victim.Host, underlay, 100))
	}
	again := l.victim.counter("softroce", "rc_retransmits")
	l.drawMSN("ACK", []roce.Syndrome{roce.SyndromeACK}, psn, msn)
	t.Logf("%d packets were sent again", l.victim.counter("softroce", "rc_retransmits")-again)
}

// drawMSN sends ACKs or NAKs for packets under way, with a drawn MSN: all are refused for that, and the connection goes on.
func (l *blindLiar) drawMSN(what string, syndromes []roce.Syndrome, psn, msn *atomic.Uint32) {
	const goesOn = 2048 // packets that the victim may send while what was forged is on its way
	l.victim.seg.Helper()
	l.meet(what+"s with a drawn MSN", "rc_drop_msn", syndromes, func() (ib.PSN, uint32) {
		return ib.PSN(psn.Load()).Add(l.r.IntN(goesOn)), msn.Load() + 1<<16 + l.r.Uint32N(1<<24-1<<17)
	})
}

// meet sends ACKs or NAKs until one has met a packet under way, which a counter tells. Whether one of those of
// two seconds does is chance.
func (l *blindLiar) meet(what, counter string, syndromes []roce.Syndrome, guess func() (ib.PSN, uint32)) {
	s := l.victim.seg
	s.Helper()
	before, met, tries := l.victim.counter("softroce", counter), uint64(0), 5
	if raceDetector {
		tries = 1 // too few are sent
	}
	for ; met == 0 && tries > 0; tries-- {
		sent, tcp := l.naks(syndromes, guess)
		l.lives(what)
		met = l.victim.counter("softroce", counter) - before
		s.Logf("%d %s beside %.0f Mb/s of TCP: %d in %s", sent, what, tcp.Mbps(), met, counter)
	}
	if met == 0 && !raceDetector {
		s.Errorf("no one of the %s found a packet under way: this shows nothing", what)
	}
}

// naks sends the victim ACKs or NAKs for its queue pair beside TCP for two seconds. guess says which.
func (l *blindLiar) naks(syndromes []roce.Syndrome, guess func() (ib.PSN, uint32)) (sent int, tcp lab.Transfer) {
	s := l.victim.seg
	s.Helper()
	rate, d := 20_000, 2*time.Second
	if raceDetector {
		rate /= 20
	}
	ctx, stop := context.WithTimeout(s.ctx, d)
	defer stop()
	var failed error
	var wg sync.WaitGroup
	wg.Go(func() {
		packets := make([][]byte, forgerBatch)
		for ctx.Err() == nil && failed == nil {
			for i := range packets {
				psn, msn := guess()
				b := make([]byte, roce.BTHLen+roce.AETHLen)
				roce.PutBTH(b, roce.BTHFields{Opcode: roce.RCAck, PKey: ib.DefaultPKey, DestQPN: ib.QPN(l.qpn), PSN: psn})
				roce.PutAETH(b[roce.BTHLen:], syndromes[l.r.IntN(len(syndromes))], msn)
				packets[i] = sealed(l.r, l.peerGID, l.gid, b)
			}
			l.load(packets)
			var n int
			n, failed = l.send(ctx, roce.Port, rate)
			sent += n
		}
	})
	limit, end := context.WithTimeout(s.ctx, d+patience)
	defer end()
	tcp, err := l.victim.Send(limit, l.peer.Host, l.peer.v4, 0, d)
	wg.Wait()
	s.must(failed)
	s.must(err)
	return sent, tcp
}

// TestBlindData: RC SENDs with the right QPN and any PSN, beside TCP. None is delivered: they
// would be echo requests from an address that has never been heard of, and answered. One of them has the
// right PSN in one of some hundred runs, so that must not happen twice.
func TestBlindData(t *testing.T) {
	parallel(t)
	s := newSegment(t, topology{hosts: 3})
	l := newBlindLiar(s)
	from, again := netip.MustParseAddr("10.0.0.200"), netip.MustParseAddr("10.0.0.201")
	if l.data(from) {
		t.Log("one of what was forged was answered")
		if l.data(again) {
			t.Error("the victim answers what was forged, twice in a row")
		}
	}
	if l.victim.counter("softroce", "rc_drop_sequence")+l.victim.counter("softroce", "rc_duplicates") == 0 {
		t.Error("no forged packet arrived: this shows nothing")
	}
}

// data sends the victim RC SENDs with any PSN, which are echo requests from an address, and reports whether
// it has answered one.
func (l *blindLiar) data(from netip.Addr) (answered bool) {
	s := l.victim.seg
	s.Helper()
	rate, n := 20_000, 20_000
	if raceDetector {
		rate, n = rate/20, n/20
	}
	packets := make([][]byte, 0, n)
	for range n {
		b := make([]byte, roce.BTHLen)
		roce.PutBTH(b, roce.BTHFields{Opcode: roce.RCSendOnly, PKey: ib.DefaultPKey, DestQPN: ib.QPN(l.qpn),
			PSN: ib.PSN(l.r.Uint32N(1 << 24)), AckReq: true})
		b = append(b, byte(encap.IPv4>>8), byte(encap.IPv4&0xff), 0, 0)
		b = append(b, echoRequest(from, l.victim.v4)...)
		packets = append(packets, sealed(l.r, l.peerGID, l.gid, b))
	}
	l.load(packets)
	s.beside(l.forger, roce.Port, rate, time.Second, l.victim, l.peer, func() {})
	l.lives("data")
	var known control.Neighbours
	s.must(l.victim.agent.Get(s.ctx, control.PathNeigh, &known))
	return slices.ContainsFunc(known.Neighbours, func(n control.Neighbour) bool { return n.IP == from.String() })
}

// TestBlindDatagrams: echo requests from an address that nobody has, by UC and by UD, to all QPNs
// whose last eight bits differ from the right one's. One packet of each kind gets in, whatever its
// PSN: the QPN is all that takes.
func TestBlindDatagrams(t *testing.T) {
	parallel(t)
	s := newSegment(t, topology{hosts: 3})
	victim, peer, x := s.hosts[0], s.hosts[1], s.hosts[2]
	victim.run("--mode", "uc")
	peer.run("--mode", "uc")
	conn, _ := victim.connect(peer, "UC")
	uc, err := parseQPN(conn.LocalQPN)
	s.must(err)
	peerQPN, err := parseQPN(peer.status().Interface.UDQPN)
	s.must(err)
	peerGID := netip.MustParseAddr(peer.status().Interface.GID)
	f := s.forger(x, victim)
	f.r = rand.New(rand.NewPCG(4791, uint64(uc)))
	for _, tt := range []struct {
		name, counter string
		right         ib.QPN
	}{{"UC", "uc_packets_in", uc}, {"UD", "ud_packets_in", f.qpn}} {
		var packets [][]byte
		for _, low := range f.r.Perm(256) {
			to, from := tt.right&^0xff|ib.QPN(low), netip.AddrFrom4([4]byte{10, 0, 0, byte(200 + low%32)})
			frame := append([]byte{byte(encap.IPv4 >> 8), byte(encap.IPv4 & 0xff), 0, 0}, echoRequest(from, victim.v4)...)
			if tt.name == "UD" {
				packets = append(packets, forgedUD(f.r, peerGID, f.gid, peerQPN, to, ib.QKeyIPoIB, frame))
				continue
			}
			b := make([]byte, roce.BTHLen)
			roce.PutBTH(b, roce.BTHFields{Opcode: roce.UCSendOnly, PKey: ib.DefaultPKey, DestQPN: to,
				PSN: ib.PSN(f.r.Uint32N(1 << 24))})
			packets = append(packets, sealed(f.r, peerGID, f.gid, append(b, frame...)))
		}
		before, unknown := victim.counter("softroce", tt.counter), victim.counter("softroce", "rx_drop_unknown_qpn")
		f.load(packets)
		ctx, stop := context.WithTimeout(s.ctx, patience)
		sent, err := f.send(ctx, roce.Port, 2000)
		stop()
		s.must(err)
		s.eventually(patience, tt.name+": all packets are counted", func() error {
			if n := victim.counter("softroce", "rx_drop_unknown_qpn") - unknown; n < uint64(sent-1) {
				return fmt.Errorf("%d of %d", n, sent-1)
			}
			return nil
		})
		if n := victim.counter("softroce", "rx_drop_unknown_qpn") - unknown; n != 255 {
			t.Errorf("%s: %d packets were for a QPN that nobody has, want 255", tt.name, n)
		}
		if n := victim.counter("softroce", tt.counter) - before; n == 0 {
			t.Errorf("%s: the packet with the right QPN did not come in", tt.name)
		}
	}
	if now := victim.conns(peer); len(now) != 1 || now[0].LocalCommID != conn.LocalCommID {
		t.Errorf("the connections are %+v, want the one of before", now)
	}
	victim.send(peer, peer.v4, 1<<20)
	peer.send(victim, victim.v4, 1<<20)
}

// echoRequest makes one of ICMP.
func echoRequest(src, dst netip.Addr) []byte {
	icmp := append([]byte{8, 0, 0, 0, 0, 1, 0, 1}, make([]byte, 32)...)
	binary.BigEndian.PutUint16(icmp[2:], ^uint16(sums.Internet(0, icmp)))
	return append(header4(src, dst, unix.IPPROTO_ICMP, len(icmp)), icmp...)
}

// watch follows the RC packets to the queue pair to, sent or received by h, by PSN, and the ACKs and NAKs
// to the queue pair from, by MSN.
func (h *host) watch(to, from ib.QPN) (psn, msn *atomic.Uint32) {
	h.seg.Helper()
	psn, msn = new(atomic.Uint32), new(atomic.Uint32)
	h.sniff(256, func(b []byte) {
		const at = etherLen + 40 + 8
		if len(b) < at+roce.BTHLen {
			return
		}
		bth := roce.BTH(b[at:])
		switch is := binary.BigEndian.Uint16(b[destPortAt:]) == roce.Port; {
		case is && bth.DestQPN() == to && bth.Opcode() < roce.RCAck:
			psn.Store(uint32(bth.PSN()))
		case is && bth.DestQPN() == from && bth.Opcode() == roce.RCAck && len(b) >= at+roce.BTHLen+roce.AETHLen:
			msn.Store(roce.AETH(b[at+roce.BTHLen:]).MSN())
		}
	})
	return psn, msn
}

// sniff gives f the first most octets of each frame that the underlay of h sends and takes, until the
// test ends. A frame is f's only while it runs.
func (h *host) sniff(most int, f func(frame []byte)) {
	h.seg.Helper()
	fd := h.packetSocket()
	done := make(chan struct{})
	var wg sync.WaitGroup
	h.seg.Cleanup(func() { close(done); wg.Wait() })
	wg.Go(func() {
		b := make([]byte, most)
		for {
			select {
			case <-done:
				return
			default:
			}
			if _, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 100); err != nil {
				continue // interrupted
			}
			if n, err := unix.Read(fd, b); err == nil {
				f(b[:n])
			}
		}
	})
}

// packetSocket sees what the underlay of h sends and takes.
func (h *host) packetSocket() (fd int) {
	s := h.seg
	s.Helper()
	link, err := h.Link(underlay)
	s.must(err)
	s.must(h.Do(func() (err error) {
		proto := uint16(unix.ETH_P_ALL<<8 | unix.ETH_P_ALL>>8)
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, int(proto)); err == nil {
			err = unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: proto, Ifindex: link.Attrs().Index})
		}
		return err
	}))
	s.Cleanup(func() { unix.Close(fd) })
	return fd
}
