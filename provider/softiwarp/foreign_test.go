package softiwarp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"ipoibcm/internal/expect"
	"ipoibcm/mpa"
	"ipoibcm/verbs"
)

// This file lets queue pairs meet a peer that the test plays itself, FPDU by FPDU.

// patience bounds every wait for what must happen.
const patience = time.Minute

func (s *side) send(wr verbs.SendWR) {
	s.t.Helper()
	wr.Flags |= verbs.Signaled
	if _, err := s.qp.PostSend([]verbs.SendWR{wr}); err != nil {
		s.t.Fatal(err)
	}
}

var (
	p2pOptions = mpa.Options{Negotiate: true, PeerToPeer: true, Depths: mpa.Depths{IRD: 4, ORD: 4}}
	p2pReply   = mpa.Frame{Enhanced: mpa.Enhanced{PeerToPeer: true, RTR: mpa.RTRAll, IRD: 4, ORD: 4}}
	p2pRequest = mpa.Frame{Rev: 2, S: true, Enhanced: mpa.Enhanced{PeerToPeer: true, RTR: mpa.RTRAll, IRD: 4, ORD: 4}}
)

// TestInitiatorSendsRTRFirst: the ULP posts at once, and the RTR indication is
// the first FPDU all the same. No completion tells of it.
func TestInitiatorSendsRTRFirst(t *testing.T) {
	for _, tt := range []struct {
		kind   mpa.RTRTypes
		opcode mpa.Opcode
		msn    uint32 // of the first Send of the user
		readN  uint32 // MSN of the first Read
	}{{mpa.RTRSend, mpa.OpSend, 2, 1}, {mpa.RTRWrite, mpa.OpWrite, 1, 1}, {mpa.RTRRead, mpa.OpReadRequest, 1, 2}} {
		for _, markers := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v markers=%v", tt.kind, markers), func(t *testing.T) {
				reply := p2pReply
				reply.Enhanced.RTR, reply.Markers, reply.CRC = tt.kind, markers, markers
				s, p := connected(t, Options{}, p2pOptions, reply)
				s.send(verbs.SendWR{ID: 7, Opcode: verbs.Send, SG: s.mem([]byte("hello"), 0)})
				rtr := p.expect(tt.opcode) // 6581-5-4, 6581-5-5, 6581-9.2-12
				if rtr.RTR() != tt.kind {
					t.Fatalf("first FPDU is %v", &rtr)
				}
				first := p.expect(mpa.OpSend)
				expect.Equal(t, first.MSN, tt.msn, "first message: MSN")
				expect.Equal(t, string(first.Payload), "hello", "first message: Payload")
				if tt.kind == mpa.RTRRead { // 6581-1.1-1
					p.segment(mpa.Segment{Opcode: mpa.OpReadResponse, Last: true, STag: 1})
				}
				s.send(verbs.SendWR{ID: 8, Opcode: verbs.Read, SG: s.mem(make([]byte, 3), 0), RKey: 99, RemoteAddr: 1000})
				read := p.expect(mpa.OpReadRequest)
				var r mpa.ReadRequest
				if err := r.UnmarshalBinary(read.Payload); err != nil {
					t.Fatalf("%+v: err is %v, want nil", r, err)
				}
				expect.MustEqual(t, read.MSN, tt.readN, "%+v: MSN", r)
				expect.MustEqual(t, r.Size, 3, "%+v: Size", r)
				expect.MustEqual(t, r.SourceSTag, 99, "%+v: SourceSTag", r)
				expect.MustEqual(t, r.SourceTO, 1000, "%+v: SourceTO", r)
				p.segment(mpa.Segment{Opcode: mpa.OpReadResponse, STag: r.SinkSTag, TO: r.SinkTO, Payload: []byte("ab")})
				p.segment(mpa.Segment{Opcode: mpa.OpReadResponse, Last: true, STag: r.SinkSTag, TO: r.SinkTO + 2,
					Payload: []byte("c")})
				// 6581-5-6: only what was posted completes
				for _, want := range []verbs.WC{{ID: 7, Opcode: verbs.Send, QPN: s.qp.QPN()},
					{ID: 8, Opcode: verbs.Read, QPN: s.qp.QPN(), ByteLen: 3}} {
					if got := s.done(); got != want {
						t.Fatalf("got %+v, want %+v", got, want)
					}
				}
			})
		}
	}
}

// TestFencing: a responder's ULP sends early, and nothing is on the wire before
// the initiator's first message. The RTR indication takes no receive.
func TestFencing(t *testing.T) {
	for _, tt := range []struct {
		name    string
		request mpa.Frame
		first   []byte // ULPDU
		user    bool   // it is a message of the user's
	}{
		{"Send", p2pRequest, mpa.AppendRTR(nil, mpa.RTRSend), false},
		{"Write", p2pRequest, mpa.AppendRTR(nil, mpa.RTRWrite), false},
		{"Read", p2pRequest, mpa.AppendRTR(nil, mpa.RTRRead), false},
		// 6581-9.2-14, 6581-9.2-18: the ULP sees to it
		{"client-server", mpa.Frame{Rev: 1}, mpa.AppendRTR(nil, mpa.RTRSend), true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, p := accepted(t, Options{}, mpa.Options{Depths: mpa.Depths{IRD: 4, ORD: 4}}, tt.request)
			s.recv(1, 10)
			s.send(verbs.SendWR{ID: 2, Opcode: verbs.Send, SG: s.mem([]byte("early"), 0)})
			p.silent() // 6581-3-2
			p.fpdu(tt.first)
			if tt.user {
				wc := s.done()
				expect.MustEqual(t, wc.ID, 1, "ID")
				expect.MustEqual(t, wc.ByteLen, 0, "ByteLen")
				expect.MustEqual(t, wc.Opcode, verbs.Recv, "Opcode")
				s.recv(1, 10)
			}
			if tt.name == "Read" {
				r := p.expect(mpa.OpReadResponse)
				expect.Equal(t, r.Last, true, "Last")
				expect.Equal(t, len(r.Payload), 0, "length of Payload")
				expect.Equal(t, r.STag, 1, "STag")
			}
			m := p.expect(mpa.OpSend)
			expect.Equal(t, string(m.Payload), "early", "Payload")
			expect.Equal(t, m.MSN, 1, "MSN")
			s.completes(2, verbs.Success)
			msn := uint32(1)
			if tt.name == "Send" || tt.user {
				msn = 2
			}
			p.segment(mpa.Segment{Opcode: mpa.OpSend, Last: true, MSN: msn, Payload: []byte("data")})
			wc := s.done()
			expect.MustEqual(t, wc.ID, 1, "ID of the completion")
			expect.MustEqual(t, wc.ByteLen, 4, "ByteLen of the completion")
			// The peer's clean end.
			_ = p.conn.Close()
			expect.Equal(t, s.fatal().Status, verbs.WRFlushError, "status of the event")
			expect.Equal(t, s.counter("peer_closed"), 1, "peer_closed")
		})
	}
}

// TestNotRTR: data before the RTR indication.
func TestNotRTR(t *testing.T) {
	s, p := accepted(t, Options{}, mpa.Options{}, p2pRequest)
	s.recv(1, 10)
	p.segment(mpa.Segment{Opcode: mpa.OpSend, Last: true, MSN: 1, Payload: []byte("data")})
	p.terminated(mpa.CodeNoRTR.Cause())
	s.completes(1, verbs.WRFlushError)
	if s.counter("mpa_not_rtr") != 1 {
		t.Error("not counted")
	}
	expect.Equal(t, s.counter("terminates_sent"), 1, "terminates_sent")
}

// TestBadFirstFPDU: what comes instead of the first message ends the connection,
// with a Terminate only if it was an FPDU, and is counted once.
func TestBadFirstFPDU(t *testing.T) {
	for _, tt := range []struct {
		name    string
		octets  func(p *peer) []byte
		ends    bool // TCP, then
		cause   mpa.Cause
		counter string
	}{
		{"CRC", func(p *peer) []byte {
			b := p.out.Append(nil, mpa.AppendRTR(nil, mpa.RTRWrite), nil)
			b[len(b)-1] ^= 1
			return b
		}, false, 0, "mpa_crc"},
		{"longer than any", func(*peer) []byte { return []byte{0xff, 0xff} }, false, 0, "mpa_ulpdu_length"},
		{"truncated", func(p *peer) []byte { return p.out.Append(nil, mpa.AppendRTR(nil, mpa.RTRWrite), nil)[:9] },
			true, 0, "mpa_closed"},
		{"nothing", func(*peer) []byte { return nil }, true, 0, "mpa_closed"},
		{"no segment", func(p *peer) []byte { return p.out.Append(nil, []byte("what is this?!"), nil) }, false,
			mpa.DDPUntaggedVersion, "rx_faults_ddp"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, p := accepted(t, Options{}, mpa.Options{CRC: true}, p2pRequest)
			p.write(tt.octets(p))
			if tt.ends {
				_ = p.conn.(*net.TCPConn).CloseWrite()
			}
			if tt.cause != 0 {
				p.terminated(tt.cause)
			} else {
				p.ended()
			}
			s.fatal()
			if n := s.counter(tt.counter); n != 1 {
				t.Errorf("%s is %d", tt.counter, n)
			}
		})
	}
}

// TestNoRTRComes: a responder waits for it no longer than RTRTimeout, and may send
// no Terminate then.
func TestNoRTRComes(t *testing.T) {
	s, p := accepted(t, Options{}, mpa.Options{RTRTimeout: 50 * time.Millisecond}, p2pRequest)
	p.ended()
	s.fatal()
	expect.Equal(t, s.qp.State(), verbs.StateError, "state")
	expect.Equal(t, s.counter("mpa_rtr_timeout"), 1, "mpa_rtr_timeout")
}

// TestAcceptRefused: a queue pair that cannot take the connection leaves none open.
func TestAcceptRefused(t *testing.T) {
	other, used := newSide(t, Options{}), newSide(t, Options{})
	if err := used.qp.Modify(verbs.QPAttr{State: verbs.StateError}); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		qp   verbs.QP
		want error
	}{
		{"another device's", other.qp, verbs.ErrInvalid},
		{"not in INIT", used.qp, verbs.ErrState},
	} {
		a, b := tcpPair(t)
		_, err := used.d.Accept(context.Background(), tt.qp, Startup{}, a,
			func(context.Context, mpa.Request) mpa.Event { return mpa.Accept{} })
		if !errors.Is(err, tt.want) {
			t.Errorf("%s: error %v, want %v", tt.name, err, tt.want)
		}
		if _, err := a.Write([]byte{0}); !errors.Is(err, net.ErrClosed) {
			t.Errorf("%s: a write afterwards: %v, want %v", tt.name, err, net.ErrClosed)
		}
		b.Close()
	}
}

// TestInitiatorTerminates: what an initiator cannot work with ends in a Terminate
// with the code, as the only FPDU.
func TestInitiatorTerminates(t *testing.T) {
	for _, tt := range []struct {
		name  string
		reply mpa.Enhanced
		code  mpa.Code
	}{
		// 6581-9.1-14
		{"responder ORD above our IRD", mpa.Enhanced{PeerToPeer: true, RTR: mpa.RTRAll, IRD: 4, ORD: 5},
			mpa.CodeInsufficient},
		{"no RTR in common", mpa.Enhanced{PeerToPeer: true, IRD: 4, ORD: 4}, mpa.CodeNoRTR}, // 6581-9.2-13
	} {
		s := newSide(t, Options{})
		a, b := tcpPair(t)
		p := &peer{t: t, conn: b}
		type end struct {
			res mpa.Result
			err error
		}
		settled := make(chan end, 1)
		go func() {
			res, err := s.d.Connect(context.Background(), s.qp, Startup{Options: p2pOptions},
				func(context.Context) (net.Conn, error) { return a, nil })
			settled <- end{res, err}
		}()
		p.frame()
		p.say(mpa.Frame{Reply: true, Rev: 2, S: true, Enhanced: tt.reply})
		p.terminated(tt.code.Cause())
		_ = p.conn.Close()
		got := <-settled
		var e *mpa.Error
		expect.MustEqual(t, errors.As(got.err, &e), true, "%s: As(got.err, &e)", tt.name)
		expect.Equal(t, e.Code(), tt.code, "%s: Code", tt.name)
		expect.Equal(t, got.res.Peer, tt.reply, "%s: Peer", tt.name)
		if s.qp.State() != verbs.StateInit {
			t.Errorf("%s: state %v", tt.name, s.qp.State())
		}
		expect.Equal(t, s.counter("terminates_sent"), 1, "%s: terminates_sent", tt.name)
	}
}

// badSegments are the cases of TestBadSegments.
var badSegments = []struct {
	name  string
	ulpdu func(s *side) []byte
	cause mpa.Cause
}{
	{"too short", func(*side) []byte { return []byte{0x41, 0x43} }, mpa.DDPCatastrophic},
	{"DDP version", func(*side) []byte { return append([]byte{0x42, 0x43}, make([]byte, 16)...) },
		mpa.DDPUntaggedVersion},
	{"RDMAP version", func(*side) []byte { return append([]byte{0x41, 0x83}, make([]byte, 16)...) }, mpa.RDMAPVersion},
	{"opcode", func(*side) []byte { return append([]byte{0x41, 0x4f}, make([]byte, 16)...) }, mpa.RDMAPOpcode},
	{"queue", func(*side) []byte {
		return (&mpa.Segment{Opcode: mpa.OpSend, Last: true, QN: 3, MSN: 2}).AppendHeader(nil)
	}, mpa.DDPQueue},
	{"MSN", func(*side) []byte {
		return (&mpa.Segment{Opcode: mpa.OpSend, Last: true, MSN: 3}).AppendHeader(nil)
	}, mpa.DDPMSN},
	{"MO", func(*side) []byte {
		return (&mpa.Segment{Opcode: mpa.OpSend, Last: true, MSN: 1, MO: 4}).AppendHeader(nil)
	}, mpa.DDPMO},
	{"longer than the receive", func(*side) []byte {
		return append((&mpa.Segment{Opcode: mpa.OpSend, Last: true, MSN: 1}).AppendHeader(nil), make([]byte, 11)...)
	}, mpa.DDPTooLong},
	{"Write to nowhere", func(*side) []byte {
		return append((&mpa.Segment{Opcode: mpa.OpWrite, Last: true, STag: 7}).AppendHeader(nil), 1)
	}, mpa.DDPInvalidSTag},
	{"Write that wraps", func(s *side) []byte {
		r := s.mem(make([]byte, 10), verbs.RemoteWrite)[0].Region
		return append((&mpa.Segment{Opcode: mpa.OpWrite, Last: true, STag: r.RKey, TO: 1<<64 - 1}).AppendHeader(nil), 1, 2)
	}, mpa.DDPWrap},
	{"Write to read-only memory", func(s *side) []byte {
		r := s.mem(make([]byte, 10), verbs.RemoteRead)[0].Region
		return append((&mpa.Segment{Opcode: mpa.OpWrite, Last: true, STag: r.RKey, TO: r.Addr}).AppendHeader(nil), 1)
	}, mpa.RDMAPAccess},
	{"Read from nowhere", func(*side) []byte { return readRequest(1, mpa.ReadRequest{Size: 1, SourceSTag: 7}) },
		mpa.RDMAPInvalidSTag},
	{"Read beyond the end", func(s *side) []byte {
		r := s.mem(make([]byte, 10), verbs.RemoteRead)[0].Region
		return readRequest(1, mpa.ReadRequest{Size: 11, SourceSTag: r.RKey, SourceTO: r.Addr})
	}, mpa.RDMAPBounds},
	{"Read of more octets than an int of 32 bits can count", func(s *side) []byte {
		r := s.mem(make([]byte, 10), verbs.RemoteRead)[0].Region
		return readRequest(1, mpa.ReadRequest{Size: 1 << 31, SourceSTag: r.RKey, SourceTO: r.Addr})
	}, mpa.RDMAPBounds},
	{"Read with the wrong MSN", func(*side) []byte { return readRequest(2, mpa.ReadRequest{}) }, mpa.DDPMSN},
	{"Read Request of the wrong length", func(*side) []byte { return readRequest(1, mpa.ReadRequest{})[:40] },
		mpa.DDPTooLong},
	{"Read Response to nothing", func(*side) []byte {
		return (&mpa.Segment{Opcode: mpa.OpReadResponse, Last: true}).AppendHeader(nil)
	}, mpa.DDPInvalidSTag},
	{"invalidation of nothing", func(*side) []byte {
		return (&mpa.Segment{Opcode: mpa.OpSendInvalidate, Last: true, MSN: 1, STag: 77}).AppendHeader(nil)
	}, mpa.RDMAPInvalidate},
}

// TestBadSegments: every fault of the peer above MPA ends in a Terminate that
// names it, a flush and a counter.
func TestBadSegments(t *testing.T) {
	for _, tt := range badSegments {
		t.Run(tt.name, func(t *testing.T) {
			s, p := accepted(t, Options{}, mpa.Options{Depths: mpa.Depths{IRD: 4, ORD: 4}}, p2pRequest)
			p.fpdu(mpa.AppendRTR(nil, mpa.RTRWrite))
			s.recv(1, 10)
			s.recv(2, 10)
			p.fpdu(tt.ulpdu(s))
			p.terminated(tt.cause)
			s.fatal()
			expect.Equal(t, s.counter("rx_faults_ddp")+s.counter("rx_faults_rdmap"), 1, "rx_faults_ddp and rx_faults_rdmap")
			expect.Equal(t, s.counter("terminates_sent"), 1, "terminates_sent")
			// Both receives come back, none with success.
			for range 2 {
				if wc := s.done(); wc.Status == verbs.Success {
					t.Errorf("%+v", wc)
				}
			}
		})
	}
}

// TestReadOfMemoryThatGoes: memory may be deregistered while the peer reads it. A Terminate then ends the
// Read Response.
func TestReadOfMemoryThatGoes(t *testing.T) {
	s, p := accepted(t, Options{}, mpa.Options{Depths: mpa.Depths{IRD: 4, ORD: 4}}, p2pRequest)
	p.fpdu(mpa.AppendRTR(nil, mpa.RTRWrite))
	const size = 32 << 20 // more than the buffers of TCP hold
	r := s.mem(make([]byte, size), verbs.RemoteRead)[0].Region
	p.fpdu(readRequest(1, mpa.ReadRequest{Size: size, SourceSTag: r.RKey, SourceTO: r.Addr}))
	p.expect(mpa.OpReadResponse)
	if err := s.d.Deregister(r); err != nil {
		t.Fatal(err)
	}
	seg, err := p.next()
	for err == nil && seg.Opcode == mpa.OpReadResponse {
		seg, err = p.next()
	}
	if err != nil || seg.Opcode != mpa.OpTerminate {
		t.Fatalf("got %v, %v behind the Read Response, want a Terminate", &seg, err)
	}
	if c, err := mpa.ParseTerminate(seg.Payload); err != nil || c != mpa.RDMAPInvalidSTag {
		t.Errorf("Terminate %v (%v), want %v", c, err, mpa.RDMAPInvalidSTag)
	}
	p.ended()
	s.fatal()
	expect.Equal(t, s.counter("terminates_sent"), 1, "terminates_sent")
}

func readRequest(msn uint32, r mpa.ReadRequest) []byte {
	return r.Append((&mpa.Segment{Opcode: mpa.OpReadRequest, Last: true, QN: mpa.QueueRead, MSN: msn}).AppendHeader(nil))
}

// TestIRD: more Reads at a time than were agreed on.
func TestIRD(t *testing.T) {
	s, p := accepted(t, Options{}, mpa.Options{Depths: mpa.Depths{IRD: 2, ORD: 4}},
		mpa.Frame{Rev: 2, S: true, Enhanced: mpa.Enhanced{IRD: 4, ORD: 2}})
	r := s.mem(bytes.Repeat([]byte("x"), 8<<20), verbs.RemoteRead)[0].Region
	var b []byte
	for i := range uint32(3) {
		b = p.out.Append(b, readRequest(i+1, mpa.ReadRequest{Size: uint32(len(r.Buf)), SourceSTag: r.RKey,
			SourceTO: r.Addr}), nil)
	}
	p.write(b) // the first response is far larger than what TCP takes at once
	for {
		seg, err := p.next()
		if err != nil {
			t.Fatal(err)
		}
		if seg.Opcode == mpa.OpTerminate {
			if c, _ := mpa.ParseTerminate(seg.Payload); c != mpa.RDMAPStream {
				t.Errorf("Terminate %v", c)
			}
			break
		}
	}
	if s.counter("reads_over_ird") != 1 {
		t.Error("not counted")
	}
}

// TestORD: no more Reads are outstanding than were agreed on. 6581-9.1-13
func TestORD(t *testing.T) {
	reply := p2pReply
	reply.Enhanced.IRD, reply.Enhanced.RTR = 2, mpa.RTRWrite
	s, p := connected(t, Options{}, p2pOptions, reply)
	for i := range uint64(5) {
		s.send(verbs.SendWR{ID: i, Opcode: verbs.Read, SG: s.mem(make([]byte, 1), 0)})
	}
	p.expect(mpa.OpWrite)
	var due []mpa.ReadRequest
	take := func() {
		t.Helper()
		var r mpa.ReadRequest
		seg := p.expect(mpa.OpReadRequest)
		if err := r.UnmarshalBinary(seg.Payload); err != nil {
			t.Fatal(err)
		}
		due = append(due, r)
	}
	take()
	take()
	p.silent()
	for i := range uint64(5) {
		p.segment(mpa.Segment{Opcode: mpa.OpReadResponse, Last: true, STag: due[0].SinkSTag, TO: due[0].SinkTO,
			Payload: []byte{1}})
		due = due[1:]
		s.completes(i, verbs.Success)
		if i < 3 {
			take()
		}
	}
	// With an ORD of none a Read cannot be sent, ever.
	s, _ = connected(t, Options{}, mpa.Options{}, mpa.Frame{})
	s.send(verbs.SendWR{ID: 1, Opcode: verbs.Read, SG: s.mem(make([]byte, 1), 0)})
	if wc := s.done(); wc.Status != verbs.LocalQPOpError {
		t.Errorf("%+v", wc)
	}
}

// TestBadFPDUs: faults of MPA itself.
func TestBadFPDUs(t *testing.T) {
	good := (&mpa.Segment{Opcode: mpa.OpSend, Last: true, MSN: 1}).AppendHeader(nil)
	for _, tt := range []struct {
		name    string
		options mpa.Options
		octets  func(p *peer) []byte
		code    mpa.Code
		counter string
	}{
		{"CRC", mpa.Options{CRC: true}, func(p *peer) []byte {
			b := p.out.Append(nil, good, nil)
			b[7] ^= 1
			return b
		}, mpa.CodeCRC, "mpa_crc"}, // 6581-8-5
		{"marker", mpa.Options{Markers: true}, func(p *peer) []byte {
			b := p.out.Append(nil, append(good, make([]byte, 600)...), nil)
			b[512-24+3] ^= 4 // the RTR took 24 octets of the first 512
			return b
		}, mpa.CodeMarker, "mpa_marker"}, // 6581-8-5
		{"ULPDU_Length", mpa.Options{}, func(*peer) []byte { return []byte{0xff, 0xff} }, mpa.CodeLocal, "mpa_ulpdu_length"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, p := accepted(t, Options{}, tt.options, p2pRequest)
			p.fpdu(mpa.AppendRTR(nil, mpa.RTRWrite))
			s.recv(1, 10)
			p.write(tt.octets(p))
			p.terminated(tt.code.Cause())
			if s.counter(tt.counter) != 1 {
				t.Error("not counted")
			}
			if wc := s.done(); wc.Status != verbs.WRFlushError {
				t.Errorf("%+v", wc)
			}
		})
	}
}

// TestPeerTerminates: what the peer says becomes the status of what it is about.
func TestPeerTerminates(t *testing.T) {
	for cause, want := range map[mpa.Cause]verbs.Status{
		mpa.RDMAPAccess: verbs.RemoteAccess, mpa.DDPNoBuffer: verbs.RNRExceeded, mpa.DDPTooLong: verbs.RemoteInvReq,
		mpa.CodeLocal.Cause(): verbs.RemoteOpError,
	} {
		s, p := connected(t, Options{}, p2pOptions, p2pReply)
		s.send(verbs.SendWR{ID: 1, Opcode: verbs.Read, SG: s.mem(make([]byte, 1), 0)})
		s.recv(2, 10)
		p.fpdu(mpa.AppendTerminate(nil, cause))
		s.completes(1, want)
		s.completes(2, verbs.WRFlushError)
		expect.Equal(t, s.fatal().Status, want, "%v: status of the event", cause)
		expect.Equal(t, s.counter("terminates_received"), 1, "%v: terminates_received", cause)
	}
}

// completes waits for a completion, which must be of that work request and with that status.
func (s *side) completes(id uint64, want verbs.Status) {
	s.t.Helper()
	wc := s.done()
	expect.MustEqual(s.t, wc.ID, id, "ID of a completion")
	expect.MustEqual(s.t, wc.Status, want, "status of the completion of %d", id)
}

// TestNoReceive: a Send is held for RecvTimeout, then the connection ends.
func TestNoReceive(t *testing.T) {
	s, p := accepted(t, Options{RecvTimeout: 100 * time.Millisecond}, mpa.Options{}, p2pRequest)
	p.fpdu(mpa.AppendRTR(nil, mpa.RTRWrite))
	p.segment(mpa.Segment{Opcode: mpa.OpSend, Last: true, MSN: 1})
	p.terminated(mpa.DDPNoBuffer)
	expect.Equal(t, s.counter("receive_waits"), 1, "receive_waits")
	expect.Equal(t, s.counter("receive_timeouts"), 1, "receive_timeouts")
}

// TestDeafPeer: one that does not read ends the connection after SendTimeout, and
// memory does not grow meanwhile: what is posted waits.
func TestDeafPeer(t *testing.T) {
	s, p := connected(t, Options{SendTimeout: 200 * time.Millisecond}, p2pOptions, p2pReply)
	sg := s.mem(make([]byte, 64<<20), 0)
	s.send(verbs.SendWR{ID: 1, Opcode: verbs.Send, SG: sg})
	s.send(verbs.SendWR{ID: 2, Opcode: verbs.Send, SG: sg})
	s.completes(1, verbs.RetryExceeded)
	s.completes(2, verbs.WRFlushError)
	_ = p.conn.Close()
}

// TestLost: TCP ends in the middle of an FPDU.
func TestLost(t *testing.T) {
	s, p := connected(t, Options{}, p2pOptions, p2pReply)
	p.write([]byte{0, 18, 0x41})
	_ = p.conn.(*net.TCPConn).CloseWrite()
	expect.Equal(t, s.fatal().Status, verbs.RetryExceeded, "status of the event")
	expect.Equal(t, s.counter("connections_lost"), 1, "connections_lost")
}

// TestDestroyDelivers: what has completed arrives even if the queue pair is
// destroyed at once.
func TestDestroyDelivers(t *testing.T) {
	s, p := connected(t, Options{}, p2pOptions, p2pReply)
	p.segment(mpa.Segment{Opcode: mpa.OpWrite, Last: true}) // there is something unread, too
	s.send(verbs.SendWR{ID: 1, Opcode: verbs.Send, SG: s.mem(make([]byte, 100000), 0)})
	s.done()
	if err := s.qp.Destroy(); err != nil {
		t.Fatal(err)
	}
	p.expect(mpa.OpWrite)
	for n := 0; n < 100000; {
		n += len(p.expect(mpa.OpSend).Payload)
	}
	p.ended()
}

func FuzzEngine(f *testing.F) {
	seed := func(segs ...[]byte) {
		var b []byte
		for _, s := range segs {
			b = append(append(b, byte(len(s))), s...)
		}
		f.Add(b)
	}
	seed((&mpa.Segment{Opcode: mpa.OpSend, Last: true, MSN: 1, Payload: []byte("x")}).AppendHeader(nil),
		readRequest(1, mpa.ReadRequest{Size: 1}))
	seed(mpa.AppendTerminate(nil, mpa.DDPBounds))
	f.Fuzz(func(t *testing.T, in []byte) {
		m := &memory{}
		m.Init(func(b []byte) { b[0]++ })
		r, _ := m.Register(make([]byte, 64), verbs.RemoteRead|verbs.RemoteWrite)
		posted, came, sent := 5, 0, 0
		e := engine{mem: m, access: 3, overIRD: new(atomic.Uint64), sq: make([]sendWQE, 4),
			sent:  func(verbs.WC) { sent++ },
			recvd: func(verbs.WC) { came++ },
			pop: func() (recvWQE, bool) {
				posted--
				return recvWQE{sg: [][]byte{make([]byte, 7), make([]byte, 9)}, len: 16}, posted >= 0
			}}
		e.begin(&mpa.Result{IRD: 3, ORD: 2}, 128, false)
		for range 2 {
			_ = e.post(&verbs.SendWR{Opcode: verbs.Read, SG: []verbs.SGE{{Buf: make([]byte, 5)}}, Flags: verbs.Signaled}, 1)
		}
		var fr mpa.Framer
		for len(in) > 1 {
			n := min(int(in[0]), len(in)-1)
			s, err := mpa.ParseSegment(in[1 : 1+n])
			in = in[1+n:]
			if err != nil {
				continue
			}
			if s.STag == 0 {
				s.STag = r.RKey
			}
			s.TO = r.Addr + s.TO%128
			if e.receive(&s) != nil {
				break
			}
			if len(e.output(&fr, nil, 1<<12)) > 1<<13 {
				t.Fatal("too much at once")
			}
			e.written()
			if n := len(e.responses); n > 3 {
				t.Fatalf("%d responses, want 3 at most", n)
			}
			if n := len(e.reads); n > 2 {
				t.Fatalf("%d reads, want 2 at most", n)
			}
		}
		e.flush(verbs.GeneralError)
		expect.MustEqual(t, sent, 2, "number of sends that completed")
		if came > 5 {
			t.Fatalf("%d receives completed, want 5 at most", came)
		}
	})
}
