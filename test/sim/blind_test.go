package sim

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"ipoibcm/cm"
	"ipoibcm/ib"
	"ipoibcm/internal/foreign"
	"ipoibcm/internal/simfabric"
	"ipoibcm/ipoib"
	"ipoibcm/serviceid"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
	"ipoibcm/wire/roce"
	"ipoibcm/wire/roce/rocetest"
)

// A blind attacker sends victim what peer might have sent. It knows both GIDs and sees
// nothing. What else a test tells it stands there.
type blind struct {
	w            *world
	r            *rand.Rand
	victim, peer *host
	as           encap.LinkAddr // the peer's
}

func (w *world) blind(victim, peer *host) *blind {
	x := w.blindAs(victim, encap.LinkAddr{QPN: peer.link.QPN, GID: peer.gid})
	x.peer = peer
	return x
}

// blindAs is blind for a peer that is not ours.
func (w *world) blindAs(victim *host, as encap.LinkAddr) *blind {
	return &blind{w: w, r: rand.New(rand.NewPCG(w.f.Seed(), 4791)), victim: victim, as: as}
}

// send seals one packet from the peer's GID and sends it. covered is BTH and what
// follows it.
func (x *blind) send(covered []byte) {
	h := roce.IPHeader{Src: x.as.GID.Addr(), Dst: x.victim.gid.Addr(), HopLimit: 64,
		SrcPort: 0xc000 | uint16(x.r.Uint32N(1<<14))}
	ip := h.Append(nil, len(covered)+roce.ICRCLen)
	ip = append(append(ip, covered...), 0, 0, 0, 0)
	if err := rocetest.Seal(ip); err != nil {
		x.w.fatalf("seal: %v", err)
	}
	if err := x.w.f.Inject(ip); err != nil {
		x.w.fatalf("inject: %v", err)
	}
}

// ack sends an ACK or NAK that counts msn messages.
func (x *blind) ack(qpn ib.QPN, psn ib.PSN, s roce.Syndrome, msn uint32) {
	b := make([]byte, roce.BTHLen+roce.AETHLen)
	roce.PutBTH(b, roce.BTHFields{Opcode: roce.RCAck, PKey: ib.DefaultPKey, DestQPN: qpn, PSN: psn})
	roce.PutAETH(b[roce.BTHLen:], s, msn)
	x.send(b)
}

// hears follows the RC packets between victim and peer for a test: the PSN of the last that
// the victim has sent, and the MSN of the last ACK or NAK that it was sent.
func (x *blind) hears(c ipoib.ConnInfo) (psn *ib.PSN, msn *uint32) {
	psn, msn = new(ib.PSN), new(uint32)
	x.victim.port.SetTap(func(out bool, ip []byte) {
		x.victim.onWire(out, ip)
		var p roce.Packet
		_, b, err := rocetest.ParseIP(ip)
		switch {
		case err != nil || p.Parse(b) != nil:
		case out && p.BTH.DestQPN() == c.RemoteQPN && p.Op != roce.RCAck:
			*psn = p.BTH.PSN()
		case !out && p.BTH.DestQPN() == c.LocalQPN && p.Op == roce.RCAck:
			*msn = p.AETH().MSN()
		}
	})
	return psn, msn
}

// data sends a whole IP packet as an RC SEND.
func (x *blind) data(qpn ib.QPN, psn ib.PSN) {
	pkt := (&packet{id: 1 << 60, src: x.peer.addr4(), dst: x.victim.addr4(), size: 100}).octets()
	b := make([]byte, roce.BTHLen)
	roce.PutBTH(b, roce.BTHFields{Opcode: roce.RCSendOnly, PKey: ib.DefaultPKey, DestQPN: qpn, PSN: psn, AckReq: true})
	x.send(append(b, foreign.Frame(pkt)...))
}

// mad sends a CM message to QP 1.
func (x *blind) mad(m mad.Message) {
	b := make([]byte, roce.BTHLen+roce.DETHLen)
	roce.PutBTH(b, roce.BTHFields{Opcode: roce.UDSendOnly, PKey: ib.DefaultPKey, DestQPN: ib.QPNGSI,
		PSN: ib.PSN(x.r.Uint32N(1 << 24))})
	roce.PutDETH(b[roce.BTHLen:], ib.QKeyGSI, ib.QPNGSI)
	b, _ = m.AppendBinary(b) // the error is always nil
	x.send(b)
}

// lives fails unless the one connection of before is there and carries packets.
func (x *blind) lives(was ipoib.ConnInfo, what string) {
	x.w.run(100 * time.Millisecond)
	for _, c := range x.victim.with(x.peer) {
		if c.Conn == was.Conn && c.State == was.State {
			x.w.arrives(x.victim, x.peer.addr4(), 100, ib.RC, time.Second)
			x.w.arrives(x.peer, x.victim.addr4(), 100, ib.RC, time.Second)
			return
		}
	}
	x.w.fatalf("%s: the connection has ended", what)
}

// connected returns a world of two hosts with one RC connection, an attacker at the
// first, and that connection as the first has it.
func connected(w *world) (*blind, ipoib.ConnInfo) { return connectedBy(w, config{}) }

// connectedBy is connected with hosts like c.
func connectedBy(w *world, c config) (*blind, ipoib.ConnInfo) {
	a, b := w.host(c), w.host(c)
	a.send(b.addr4(), 100, true)
	w.run(500 * time.Millisecond)
	cs := a.with(b)
	w.want(len(cs) == 1, "%d connections, want 1", len(cs))
	return w.blind(a, b), cs[0]
}

// counted returns a counter of the queue pairs of h.
func (h *host) counted(name string) (n int) {
	h.port.Counters(func(k string, v uint64) {
		if k == name {
			n = int(v)
		}
	})
	return n
}

// TestBlindNAK: the attacker is told the QPN (24 bits), the MSN and 12 bits of the PSN, while
// the victim has packets under way all the time. So a guess is right as often as one
// with neither of them would be after 2^36 times as many. What is right makes the
// victim ask again, and nothing else.
func TestBlindNAK(t *testing.T) {
	const knownPSN, packets = 12, 400
	for _, tt := range []struct {
		name     string
		syndrome roce.Syndrome
		counter  string // of right guesses; none for what comes from the peer too
	}{
		{"invalid request", roce.NAKInvalidReq, "naks_challenged"},
		{"remote access", roce.NAKRemoteAccess, "naks_challenged"},
		{"remote operation", roce.NAKRemoteOp, "naks_challenged"},
		{"sequence", roce.NAKSequence, "naks_in"},
		{"RNR", roce.RNRSyndrome(1), "rnr_in"},
		{"ACK", roce.SyndromeACK, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			guesses, right, n := 0, 0, 0
			seeds(t, 20, func(w *world) {
				x, was := connected(w)
				w.f.Delay = 2 * time.Millisecond
				before := x.victim.counted(tt.counter)
				var sent []*packet
				last, msn := x.hears(was)
				for range packets {
					if p := x.victim.send(x.peer.addr4(), 20000, true); p != nil {
						sent = append(sent, p)
					}
					for range 8 {
						x.ack(was.LocalQPN, *last&^(1<<(24-knownPSN)-1)|ib.PSN(x.r.Uint32N(1<<(24-knownPSN))), tt.syndrome, *msn)
						guesses++
					}
					w.run(time.Millisecond)
				}
				w.run(100 * time.Millisecond)
				right += x.victim.counted(tt.counter) - before
				asked, lies := x.victim.counted("naks_challenged"), x.victim.counted("naks_false")
				w.want(asked == lies, "%d fatal NAKs were challenged, %d found to be false", asked, lies)
				w.want(asked == 0 || tt.counter == "naks_challenged", "%d NAKs that are not fatal were challenged", asked)
				x.lives(was, tt.name)
				for _, p := range sent {
					w.want(p.delivered == 1, "%v was delivered %d times", p, p.delivered)
				}
				n++
				w.settle()
				w.end()
			})
			if right == 0 && tt.counter != "" {
				t.Fatalf("no guess of %d was right: this shows nothing", guesses)
			}
			if tt.counter != "" {
				t.Logf("%d guesses in %d runs, of which %d found the window", guesses, n, right)
			}
		})
	}
}

// TestBlindMSN: the attacker is told the QPN and the PSN of what is under way, while the network
// loses packets. What it lacks is how many messages the peer has got, which each ACK and NAK says. One
// that were believed would acknowledge packets that the peer has never seen. None is: the connection
// of before goes on.
func TestBlindMSN(t *testing.T) {
	for _, tt := range []struct {
		name     string
		syndrome roce.Syndrome
	}{
		{"remote access", roce.NAKRemoteAccess},
		{"sequence", roce.NAKSequence},
		{"RNR", roce.RNRSyndrome(1)},
		{"ACK", roce.SyndromeACK},
		{"for reliable datagrams", roce.Syndrome(0x64)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			seeds(t, 20, func(w *world) {
				x, was := connected(w)
				for range 40 { // until the peer has shown that it counts
					x.victim.send(x.peer.addr4(), 100, true)
					w.run(time.Millisecond)
				}
				w.f.Delay, w.f.Loss = time.Millisecond, 0.03
				last, msn := x.hears(was)
				var sent []*packet
				for range 400 {
					if p := x.victim.send(x.peer.addr4(), 20000, true); p != nil {
						sent = append(sent, p)
					}
					for range 4 {
						x.ack(was.LocalQPN, last.Add(-x.r.IntN(8)), tt.syndrome, *msn+1<<16+x.r.Uint32N(1<<24-1<<17))
					}
					w.run(time.Millisecond)
				}
				w.f.Loss = 0
				w.run(100 * time.Millisecond)
				x.lives(was, tt.name)
				for _, p := range sent {
					w.want(p.delivered <= 1, "%v was delivered %d times", p, p.delivered)
				}
				w.want(x.victim.counted("naks_challenged") == 0, "%d NAKs were challenged", x.victim.counted("naks_challenged"))
				w.settle()
				w.end()
			})
		})
	}
}

// TestBlindData: packets of data with the right QPN and one of all PSNs but the one
// that is expected: none is delivered, and the connection goes on.
func TestBlindData(t *testing.T) {
	seeds(t, 10, func(w *world) {
		x, was := connected(w)
		right := x.victim.conns[was.Conn].rtr.RQPSN
		for range 3000 {
			if psn := ib.PSN(x.r.Uint32N(1 << 24)); psn.Sub(right) < 0 || psn.Sub(right) > 100 {
				x.data(was.LocalQPN, psn)
			}
			w.run(10 * time.Microsecond)
		}
		x.lives(was, "data")
		w.settle()
		w.end()
	})
}

// secrets are what a CM message about a connection names.
type secrets struct {
	local, remote uint32 // communication IDs, of victim and peer
	qpn           ib.QPN // the victim's
	peerQPN       ib.QPN
	guid          ib.GUID // the peer's CA GUID, which each of its REPs tells
}

// ids returns the communication IDs as the peer names them.
func (s *secrets) ids() (local, remote mad.CommID) { return mad.CommID(s.remote), mad.CommID(s.local) }

// blindMessages are the cases of TestBlindCM.
var blindMessages = []struct {
	name  string
	make  func(x *blind, s *secrets) mad.Message
	lacks []string // any of these is enough to protect the connection
}{
	{"DREQ", func(_ *blind, s *secrets) mad.Message {
		l, r := s.ids()
		return mad.DREQ{LocalCommID: l, RemoteCommID: r, RemoteQPN: s.qpn}
	}, []string{"the victim's communication ID", "the peer's communication ID", "the victim's QPN"}},
	{"DREP", func(_ *blind, s *secrets) mad.Message {
		l, r := s.ids()
		return mad.DREP{LocalCommID: l, RemoteCommID: r}
	}, []string{"nothing"}},
	{"REJ", func(_ *blind, s *secrets) mad.Message {
		l, r := s.ids()
		return mad.REJ{LocalCommID: l, RemoteCommID: r, MessageRejected: mad.KindOther, Reason: cm.ReasonConsumer}
	}, []string{"the victim's communication ID", "the peer's communication ID"}},
	{"REJ 4 with the CA GUID", func(_ *blind, s *secrets) mad.Message {
		l, r := s.ids()
		rej := mad.REJ{LocalCommID: l, RemoteCommID: r, MessageRejected: mad.KindOther, Reason: cm.ReasonTimeout,
			ARILength: 8}
		binary.BigEndian.PutUint64(rej.ARI[:], uint64(s.guid))
		return rej
	}, []string{"the victim's communication ID", "the peer's communication ID"}},
	{"RTU", func(_ *blind, s *secrets) mad.Message {
		l, r := s.ids()
		return mad.RTU{LocalCommID: l, RemoteCommID: r}
	}, []string{"nothing"}},
	{"MRA", func(_ *blind, s *secrets) mad.Message {
		l, r := s.ids()
		return mad.MRA{LocalCommID: l, RemoteCommID: r, ServiceTimeout: 31}
	}, []string{"nothing"}},
	{"LAP", func(_ *blind, s *secrets) mad.Message {
		l, r := s.ids()
		return mad.LAP{LocalCommID: l, RemoteCommID: r}
	}, []string{"nothing"}},
	{"REP", func(x *blind, s *secrets) mad.Message {
		l, r := s.ids()
		return mad.REP{LocalCommID: l, RemoteCommID: r, LocalQPN: s.peerQPN, StartingPSN: 7, LocalCAGUID: s.guid}
	}, []string{"nothing"}},
	{"REQ that names the peer's QP", func(x *blind, s *secrets) mad.Message { return x.req(s.peerQPN, s.guid) },
		[]string{"nothing"}},
	{"REQ in the peer's name", func(x *blind, s *secrets) mad.Message {
		return x.req(ib.QPN(2+x.r.Uint32N(1<<24-3)), s.guid)
	}, []string{"nothing"}},
}

// TestBlindCM: the attacker knows all about a connection but one item, which it draws
// anew each time. Whatever the message, the connection goes on.
func TestBlindCM(t *testing.T) {
	items := map[string]func(*secrets, *rand.Rand){
		"the victim's communication ID": func(s *secrets, r *rand.Rand) { s.local = r.Uint32() },
		"the peer's communication ID":   func(s *secrets, r *rand.Rand) { s.remote = r.Uint32() },
		"the victim's QPN":              func(s *secrets, r *rand.Rand) { s.qpn = ib.QPN(2 + r.Uint32N(1<<24-3)) },
		"nothing":                       func(*secrets, *rand.Rand) {},
	}
	for _, tt := range blindMessages {
		for _, lacks := range tt.lacks {
			t.Run(tt.name+" without "+lacks, func(t *testing.T) {
				seeds(t, 5, func(w *world) {
					x, was := connected(w)
					for i := range 300 {
						s := secrets{was.LocalComm, was.RemoteComm, was.LocalQPN, was.RemoteQPN, x.peer.port.Port().GUID}
						items[lacks](&s, x.r)
						x.mad(tt.make(x, &s))
						w.run(17 * time.Millisecond) // 64 a second pass
						if i%100 == 0 {
							x.lives(was, tt.name)
						}
					}
					x.lives(was, tt.name)
					w.settle()
					w.end()
				})
			})
		}
	}
}

// req makes a REQ that the peer might send.
func (x *blind) req(qpn ib.QPN, guid ib.GUID) mad.REQ {
	req := mad.REQ{TransactionID: x.r.Uint64(), LocalCommID: mad.CommID(x.r.Uint32()),
		ServiceID: serviceid.New(serviceid.RFC, x.victim.link.QPN), LocalCAGUID: guid, LocalQPN: qpn,
		RemoteCMResponseTimeout: 16, LocalCMResponseTimeout: 16, Transport: ib.RC,
		StartingPSN: ib.PSN(x.r.Uint32N(1 << 24)), RetryCount: 7, RNRRetryCount: 7, PKey: ib.DefaultPKey,
		PathMTU: ib.MTU1024, MaxCMRetries: 15, SRQ: true}
	req.Primary = mad.PathInfo{LocalLID: ib.PermissiveLID, RemoteLID: ib.PermissiveLID, LocalGID: x.as.GID,
		RemoteGID: x.victim.gid, HopLimit: 64, LocalACKTimeout: 14}
	pd, _ := encap.PrivateData{QPN: x.as.QPN, ReceiveMTU: 65524}.AppendBinary(nil)
	copy(req.PrivateData[:], pd)
	return req
}

// TestBlindGuesses: the attacker lacks the last eight bits of one item, and tries all
// of them in a drawn order. A DREQ ends the connection with the right one, not before,
// and takes half of them on average: every bit counts.
func TestBlindGuesses(t *testing.T) {
	const bits = 8
	for _, item := range []string{"the victim's communication ID", "the peer's communication ID", "the victim's QPN"} {
		t.Run(item, func(t *testing.T) {
			sum, n := 0, 0
			seeds(t, 20, func(w *world) {
				x, was := connected(w)
				order := x.r.Perm(1 << bits)
				took := 0
				for i, low := range order {
					local, remote, qpn := was.LocalComm, was.RemoteComm, uint32(was.LocalQPN)
					field := map[string]*uint32{"the victim's communication ID": &local,
						"the peer's communication ID": &remote, "the victim's QPN": &qpn}[item]
					right := *field&(1<<bits-1) == uint32(low)
					*field = *field&^(1<<bits-1) | uint32(low)
					x.mad(mad.DREQ{LocalCommID: mad.CommID(remote), RemoteCommID: mad.CommID(local), RemoteQPN: ib.QPN(qpn)})
					w.run(time.Millisecond)
					ended := true
					for _, c := range x.victim.with(x.peer) {
						ended = ended && c.Conn != was.Conn
					}
					w.want(ended == right, "guess %d: the connection has ended %v, the guess is right %v", i+1, ended, right)
					if took = i + 1; ended {
						break
					}
				}
				sum, n = sum+took, n+1
				w.settle()
				w.end()
			})
			t.Logf("%d guesses on average of %d runs; %d are to be expected", sum/n, n, (1<<bits+1)/2)
		})
	}
}

// TestBlindDatagrams: the attacker knows all but the last eight bits of the QPN of a UC connection,
// or of the UD QPN, and tries all of them in a drawn order. Only a packet to the right
// one gets in, with any PSN; it takes half of them on average. On the connection that is
// left to test/netns: here it would be a packet that nobody has sent.
func TestBlindDatagrams(t *testing.T) {
	const bits = 8
	for _, tt := range []struct {
		name string
		qpn  func(x *blind, was ipoib.ConnInfo) ib.QPN
		op   roce.Opcode
	}{
		{"UC", func(_ *blind, was ipoib.ConnInfo) ib.QPN { return was.LocalQPN }, roce.UCSendOnly},
		{"UD", func(x *blind, _ ipoib.ConnInfo) ib.QPN { return x.victim.link.QPN }, roce.UDSendOnly},
	} {
		t.Run(tt.name, func(t *testing.T) {
			sum, n := 0, 0
			seeds(t, 20, func(w *world) {
				x, was := connectedBy(w, config{mode: ipoib.ModeUC})
				w.run(5 * time.Second) // addresses are checked for duplicates
				right := tt.qpn(x, was)
				for i, low := range x.r.Perm(1 << bits) {
					qpn := right&^(1<<bits-1) | ib.QPN(low)
					before := x.victim.counted("packets_in")
					if qpn == right && tt.op == roce.UCSendOnly {
						sum, n = sum+i+1, n+1
						continue
					}
					x.datagram(tt.op, qpn)
					w.run(time.Millisecond)
					in := x.victim.counted("packets_in") - before
					w.want((in > 0) == (qpn == right), "guess %d: %d packets came in, the guess is right: %v", i+1, in, qpn == right)
					if qpn == right {
						sum, n = sum+i+1, n+1
					}
				}
				w.settle()
				w.end()
			})
			t.Logf("%d guesses on average of %d runs; %d are to be expected", sum/n, n, (1<<bits+1)/2)
		})
	}
}

// TestBlindCNP: the attacker lacks the last eight bits of the QPN, and sends CNPs to all of them in a drawn order, beside
// traffic. One comes in, as do 100 more when it is told the QPN. None has an effect: nothing here is ECN-capable. What they
// do where packets are is left to provider/softroce/engine and test/netns.
func TestBlindCNP(t *testing.T) {
	const bits, told = 8, 100
	seeds(t, 20, func(w *world) {
		x, was := connected(w)
		in := func() int { return x.victim.counted("cnps_in") }
		var sent []*packet
		cnp := func(qpn ib.QPN) {
			b := make([]byte, roce.BTHLen+16) // the rest is reserved
			roce.PutBTH(b, roce.BTHFields{Opcode: roce.CNP, PKey: ib.DefaultPKey, DestQPN: qpn})
			sent = append(sent, x.victim.send(x.peer.addr4(), 20000, true))
			x.send(b)
			w.run(2 * time.Millisecond) // longer than a round trip
		}
		for i, low := range x.r.Perm(1 << bits) {
			qpn := was.LocalQPN&^(1<<bits-1) | ib.QPN(low)
			before := in()
			cnp(qpn)
			w.want((in() > before) == (qpn == was.LocalQPN), "guess %d: %d CNPs came in, the guess is right: %v", i+1, in()-before,
				qpn == was.LocalQPN)
		}
		for range told {
			cnp(was.LocalQPN)
		}
		w.want(in() == 1+told, "%d CNPs came in, want %d", in(), 1+told)
		w.want(x.victim.counted("cnps_ignored") == in(), "%d of %d CNPs were ignored", x.victim.counted("cnps_ignored"), in())
		for _, p := range sent {
			w.want(p.delivered == 1, "%v was delivered %d times", p, p.delivered)
		}
		x.lives(was, "CNP")
		w.settle()
		w.end()
	})
}

// datagram sends a frame of a type that nobody knows.
func (x *blind) datagram(op roce.Opcode, qpn ib.QPN) {
	b := make([]byte, roce.BTHLen)
	roce.PutBTH(b, roce.BTHFields{Opcode: op, PKey: ib.DefaultPKey, DestQPN: qpn, PSN: ib.PSN(x.r.Uint32N(1 << 24))})
	if op == roce.UDSendOnly {
		b = append(b, make([]byte, roce.DETHLen)...)
		roce.PutDETH(b[roce.BTHLen:], ib.QKeyIPoIB, x.peer.link.QPN)
	}
	x.send(append(b, make([]byte, 64)...))
}

// TestBlindAnswers: a REQ of the victim is out, and the peer's answer does not come. The attacker
// knows all but the last eight bits of its communication ID, and tries all of them in a drawn
// order. The right one is taken for the peer's answer, no other does anything, and it takes half of
// them on average. Meanwhile UD goes on. What a REP does is left to TestBlindREP.
func TestBlindAnswers(t *testing.T) {
	const bits = 8
	for _, tt := range []struct {
		name  string
		make  func(x *blind, id mad.CommID) mad.Message
		state string // of the connection afterwards; "" that there is none
	}{
		{"REJ", func(x *blind, id mad.CommID) mad.Message {
			return mad.REJ{LocalCommID: mad.CommID(x.r.Uint32()), RemoteCommID: id, MessageRejected: mad.KindREQ,
				Reason: cm.ReasonNoResources}
		}, ""},
		{"REJ 8 that names another UD QPN", func(x *blind, id mad.CommID) mad.Message {
			rej := mad.REJ{LocalCommID: mad.CommID(x.r.Uint32()), RemoteCommID: id, MessageRejected: mad.KindREQ,
				Reason: cm.ReasonInvalidServiceID}
			pd, _ := encap.PrivateData{QPN: 2 + ib.QPN(x.r.Uint32N(1<<24-3)), ReceiveMTU: 65524}.AppendBinary(nil)
			copy(rej.PrivateData[:], pd)
			return rej
		}, ""},
		{"MRA", func(x *blind, id mad.CommID) mad.Message {
			return mad.MRA{LocalCommID: mad.CommID(x.r.Uint32()), RemoteCommID: id, MessageMRAed: mad.KindREQ,
				ServiceTimeout: 31}
		}, "MRA_REQ_RCVD"},
		{"REP", func(x *blind, id mad.CommID) mad.Message { return x.rep(id) }, "ESTABLISHED"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			sum, n := 0, 0
			seeds(t, 20, func(w *world) {
				x, was := asking(w)
				for i, low := range x.r.Perm(1 << bits) {
					id := was.LocalComm&^(1<<bits-1) | uint32(low)
					// what comes of that is not what this test is about
					if id == was.LocalComm && tt.state == "ESTABLISHED" {
						sum, n = sum+i+1, n+1
						break
					}
					x.mad(tt.make(x, mad.CommID(id)))
					w.run(time.Millisecond)
					state := ""
					for _, c := range x.victim.with(x.peer) {
						if c.LocalComm == was.LocalComm {
							state = c.State
						}
					}
					if right := id == was.LocalComm; !right {
						w.want(state == was.State, "guess %d is wrong: the connection is %q, want %q", i+1, state, was.State)
						continue
					}
					w.want(state == tt.state, "the right guess: the connection is %q, want %q", state, tt.state)
					sum, n = sum+i+1, n+1
					break
				}
				w.arrives(x.victim, x.peer.addr4(), 100, ib.UD, 10*time.Millisecond)
				w.f.Filter = nil
				w.settle()
				w.end()
			})
			t.Logf("%d guesses on average of %d runs; %d are to be expected", sum/n, n, (1<<bits+1)/2)
		})
	}
}

// rep makes a REP to a REQ of the victim.
func (x *blind) rep(id mad.CommID) mad.REP {
	rep := mad.REP{LocalCommID: mad.CommID(x.r.Uint32()), RemoteCommID: id, LocalQPN: 2 + ib.QPN(x.r.Uint32N(1<<24-3)),
		StartingPSN: ib.PSN(x.r.Uint32N(1 << 24)), LocalCAGUID: ib.GUID(x.r.Uint64()), RNRRetryCount: 7, SRQ: true}
	pd, _ := encap.PrivateData{QPN: x.peer.link.QPN, ReceiveMTU: 65524}.AppendBinary(nil)
	copy(rep.PrivateData[:], pd)
	return rep
}

// TestBlindREP: a REP that is believed makes a connection to a queue pair that does not exist. What is sent on it is
// lost, until its retries are over: UD goes on then, and the next connection is the peer's.
func TestBlindREP(t *testing.T) {
	const every, within = 10 * time.Millisecond, 2 * time.Second
	var took []time.Duration
	seeds(t, 20, func(w *world) {
		x, was := asking(w)
		rep := x.rep(mad.CommID(was.LocalComm))
		w.ends[end{x.peer.gid, rep.LocalQPN}] = &conn{receive: 65524} // so that the model lets the victim send there
		x.mad(rep)
		w.run(time.Millisecond)
		cs := x.victim.with(x.peer)
		w.want(len(cs) == 1, "%d connections, want 1", len(cs))
		w.want(cs[0].State == "ESTABLISHED", "the connection is %s, want ESTABLISHED", cs[0].State)
		begin := w.f.Now()
		p := x.victim.send(x.peer.addr4(), 100, true)
		w.run(every)
		w.want(p.delivered == 0, "%v was delivered on a connection that leads nowhere", p)
		for p.delivered == 0 {
			p = x.victim.send(x.peer.addr4(), 100, true)
			w.run(every)
			w.want(w.f.Now().Sub(begin) <= within, "%v was not delivered, after %v", p, within)
		}
		w.want(p.mode() == ib.UD, "%v went by %v, want UD", p, p.mode())
		took = append(took, w.f.Now().Sub(begin))
		w.f.Filter = nil
		w.settle()
		w.end()
	})
	slices.Sort(took)
	t.Logf("packets arrive after %v to %v in %d runs", took[0], took[len(took)-1], len(took))
}

// asking returns a world of two hosts that know each other. The REQ of the first is out, and what
// the second says at QP 1 is lost.
func asking(w *world) (*blind, ipoib.ConnInfo) {
	a, b := w.host(config{}), w.host(config{})
	w.f.Filter = func(from, _ *simfabric.Port, ip []byte) bool {
		var p roce.Packet
		_, payload, err := rocetest.ParseIP(ip)
		return from != b.port || err != nil || p.Parse(payload) != nil || p.BTH.DestQPN() != ib.QPNGSI
	}
	a.send(b.addr4(), 100, true)
	w.run(10 * time.Millisecond)
	cs := a.with(b)
	w.want(len(cs) == 1, "%d connections, want 1", len(cs))
	w.want(cs[0].State == "REQ_SENT", "the connection is %s, want REQ_SENT", cs[0].State)
	return w.blind(a, b), cs[0]
}
