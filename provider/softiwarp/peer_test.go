package softiwarp

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/mpa"
	"ipoibcm/verbs"
)

// tcpPair returns both ends of a TCP connection on the loopback device.
func tcpPair(t *testing.T) (a, b net.Conn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	a, err = net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	if b, err = ln.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = a.Close(), b.Close() })
	return a, b
}

// A side is a queue pair of ours with its queues.
type side struct {
	t  *testing.T
	d  *Device
	qp verbs.QP
	cq verbs.CQ
}

func newSide(t *testing.T, o Options) *side {
	t.Helper()
	o.Addr, o.Port = netip.MustParseAddr("127.0.0.1"), -1
	d, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	cq, err := d.CreateCQ(100)
	if err != nil {
		t.Fatal(err)
	}
	qp, err := d.CreateQP(verbs.QPInit{Transport: ib.RC, SendCQ: cq, RecvCQ: cq, SendDepth: 100, RecvDepth: 100,
		MaxSendSGE: 2, MaxRecvSGE: 2})
	if err != nil {
		t.Fatal(err)
	}
	if err := qp.Modify(verbs.QPAttr{State: verbs.StateInit, PKey: ib.DefaultPKey,
		Access: verbs.RemoteRead | verbs.RemoteWrite}); err != nil {
		t.Fatal(err)
	}
	return &side{t, d, qp, cq}
}

func (s *side) mem(b []byte, access verbs.Access) []verbs.SGE {
	s.t.Helper()
	r, err := s.d.Register(b, access)
	if err != nil {
		s.t.Fatal(err)
	}
	return []verbs.SGE{{Region: r, Buf: r.Buf}}
}

func (s *side) recv(id uint64, n int) []byte {
	s.t.Helper()
	sg := s.mem(make([]byte, n), 0)
	if _, err := s.qp.PostRecv([]verbs.RecvWR{{ID: id, SG: sg}}); err != nil {
		s.t.Fatal(err)
	}
	return sg[0].Buf
}

func (s *side) done() verbs.WC {
	s.t.Helper()
	var wc [1]verbs.WC
	expect.Eventually(s.t, "a completion", func() bool { return s.cq.Poll(wc[:]) == 1 })
	return wc[0]
}

func (s *side) fatal() verbs.Event {
	s.t.Helper()
	end := time.After(patience)
	for {
		select {
		case ev := <-s.d.Events():
			if ev.Kind == verbs.QPFatal {
				return ev
			}
		case <-end:
			s.t.Fatal("no QPFatal")
		}
	}
}

func (s *side) counter(name string) (v uint64) {
	s.t.Helper()
	found := false
	s.d.Counters(func(n string, x uint64) {
		if n == name {
			v, found = x, true
		}
	})
	if !found {
		s.t.Fatalf("no counter %s", name)
	}
	return v
}

// A peer is the end that the test plays.
type peer struct {
	t    *testing.T
	conn net.Conn
	out  mpa.Framer
	in   mpa.Deframer
	rest []byte
}

func (p *peer) write(b []byte) {
	p.t.Helper()
	if _, err := p.conn.Write(b); err != nil {
		p.t.Fatal(err)
	}
}

func (p *peer) fpdu(ulpdu []byte) { p.t.Helper(); p.write(p.out.Append(nil, ulpdu, nil)) }

func (p *peer) segment(s mpa.Segment) {
	p.t.Helper()
	p.fpdu(append(s.AppendHeader(nil), s.Payload...))
}

// frame reads one startup frame.
func (p *peer) frame() mpa.Frame {
	p.t.Helper()
	_ = p.conn.SetReadDeadline(time.Now().Add(patience))
	b := make([]byte, mpa.MaxFrameLen)
	if _, err := io.ReadFull(p.conn, b[:mpa.FrameHeaderLen]); err != nil {
		p.t.Fatal(err)
	}
	n := mpa.FrameHeaderLen + int(b[18])<<8 + int(b[19])
	if _, err := io.ReadFull(p.conn, b[mpa.FrameHeaderLen:n]); err != nil {
		p.t.Fatal(err)
	}
	var f mpa.Frame
	if err := f.UnmarshalBinary(b[:n]); err != nil {
		p.t.Fatal(err)
	}
	return f
}

func (p *peer) say(f mpa.Frame) {
	p.t.Helper()
	b, err := f.AppendBinary(nil)
	if err != nil {
		p.t.Fatal(err)
	}
	p.write(b)
}

// next reads the next segment.
func (p *peer) next() (mpa.Segment, error) {
	_ = p.conn.SetReadDeadline(time.Now().Add(patience))
	for {
		u, rest, ok, err := p.in.Next(p.rest)
		p.rest = rest
		if err != nil {
			return mpa.Segment{}, err
		}
		if ok {
			s, terr := mpa.ParseSegment(u)
			s.Payload = bytes.Clone(s.Payload)
			if terr != nil {
				return s, terr
			}
			return s, nil
		}
		b := make([]byte, 1<<16)
		n, rerr := p.conn.Read(b)
		if p.rest = b[:n]; rerr != nil && n == 0 {
			return mpa.Segment{}, rerr
		}
	}
}

func (p *peer) expect(op mpa.Opcode) mpa.Segment {
	p.t.Helper()
	s, err := p.next()
	if err != nil || s.Opcode != op {
		p.t.Fatalf("got %v, %v; want %v", &s, err, op)
	}
	return s
}

// silent checks that nothing comes for a while.
func (p *peer) silent() {
	p.t.Helper()
	_ = p.conn.SetReadDeadline(time.Now().Add(80 * time.Millisecond))
	var b [1]byte
	switch n, err := p.conn.Read(b[:]); {
	case n > 0:
		p.t.Fatalf("n is %v, want 0", n)
	case err == nil:
		p.t.Fatalf("err is nil")
	case !isTimeout(err):
		p.t.Fatalf("isTimeout(err) is false, want true")
	}
}

func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}

// terminated expects a Terminate, and the end.
func (p *peer) terminated(want mpa.Cause) {
	p.t.Helper()
	s := p.expect(mpa.OpTerminate)
	if c, err := mpa.ParseTerminate(s.Payload); err != nil || c != want {
		p.t.Fatalf("Terminate %v (%v), want %v", c, err, want)
	}
	p.ended()
}

func (p *peer) ended() {
	p.t.Helper()
	if s, err := p.next(); !errors.Is(err, io.EOF) {
		p.t.Fatalf("got %v, %v; want the end", &s, err)
	}
}

// begin has settle connect our queue pair by conn, whose other end the peer has.
func begin(t *testing.T, o Options, settle func(s *side, conn net.Conn) error) (*side, *peer, <-chan error) {
	t.Helper()
	s := newSide(t, o)
	a, b := tcpPair(t)
	settled := make(chan error, 1)
	go func() { settled <- settle(s, a) }()
	return s, &peer{t: t, conn: b}, settled
}

// connected has our queue pair initiate; the peer answers with that reply.
func connected(t *testing.T, o Options, opts mpa.Options, reply mpa.Frame) (*side, *peer) {
	t.Helper()
	s, p, settled := begin(t, o, func(s *side, conn net.Conn) error {
		_, err := s.d.Connect(context.Background(), s.qp, Startup{Options: opts},
			func(context.Context) (net.Conn, error) { return conn, nil })
		return err
	})
	req := p.frame()
	reply.Reply, reply.Rev, reply.S = true, req.Rev, req.S
	p.out = mpa.Framer{Markers: req.Markers, CRC: req.CRC || reply.CRC}
	p.in = mpa.Deframer{Markers: reply.Markers, CRC: p.out.CRC}
	p.say(reply)
	if err := <-settled; err != nil {
		t.Fatal(err)
	}
	return s, p
}

// accepted has our queue pair respond to that request, up to its reply.
func accepted(t *testing.T, o Options, opts mpa.Options, request mpa.Frame) (*side, *peer) {
	t.Helper()
	s, p, settled := begin(t, o, func(s *side, conn net.Conn) error {
		_, err := s.d.Accept(context.Background(), s.qp, Startup{Options: opts}, conn,
			func(context.Context, mpa.Request) mpa.Event { return mpa.Accept{} })
		return err
	})
	p.say(request)
	rep := p.frame()
	p.out = mpa.Framer{Markers: rep.Markers, CRC: rep.CRC}
	p.in = mpa.Deframer{Markers: request.Markers, CRC: rep.CRC}
	if err := <-settled; err != nil {
		t.Fatal(err)
	}
	return s, p
}
