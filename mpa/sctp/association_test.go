package sctp

import (
	"bytes"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pion/logging"
	pion "github.com/pion/sctp"

	"ipoibcm/internal/expect"
	"ipoibcm/mpa"
)

// This file carries sessions over real SCTP: a user-space implementation of
// others, on UDP between two sockets of the loopback device. It cannot send the
// adaptation layer indication (RFC 5043 section 5.1), so that one is not shown.

// carrier is one end: an SCTP association, the endpoint on it, and the goroutine
// that owns both.
type carrier struct {
	*Endpoint
	t     *testing.T
	assoc *pion.Association
	in    chan Chunk

	mu      sync.Mutex
	streams map[uint16]*pion.Stream
}

// swapping delivers packets in another order: every third one waits for the
// next, or for a moment if none comes. SCTP then delivers unordered messages as
// they come.
type swapping struct {
	net.Conn
	mu   sync.Mutex
	n    int
	held []byte
}

func (s *swapping) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.n++
	if s.n%3 == 0 && s.held == nil {
		s.held = bytes.Clone(b)
		time.AfterFunc(3*time.Millisecond, func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.release()
		})
		return len(b), nil
	}
	n, err := s.Conn.Write(b)
	s.release()
	return n, err
}

func (s *swapping) release() {
	if s.held != nil {
		_, _ = s.Conn.Write(s.held) // it may be closed by now
		s.held = nil
	}
}

// associate returns two ends of one association.
func associate(t *testing.T, swap bool, opts EndpointOptions) (a, b *carrier) {
	t.Helper()
	la, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Skip(err)
	}
	lb, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	to := func(l *net.UDPConn, peer net.Addr) net.Conn {
		var c net.Conn = datagrams{l, peer}
		if swap {
			c = &swapping{Conn: c}
		}
		return c
	}
	opts.Listen = true
	e := newEndpoints(t, opts)
	a = &carrier{Endpoint: e.a, t: t, in: make(chan Chunk, 1000), streams: map[uint16]*pion.Stream{}}
	b = &carrier{Endpoint: e.b, t: t, in: make(chan Chunk, 1000), streams: map[uint16]*pion.Stream{}}
	var wg sync.WaitGroup
	defer wg.Wait()
	start := func(c *carrier, conn net.Conn, f func(pion.Config) (*pion.Association, error)) {
		assoc, err := f(pion.Config{NetConn: conn, LoggerFactory: &logging.DefaultLoggerFactory{}, MTU: 1200})
		if err != nil {
			t.Error(err)
			return
		}
		c.assoc = assoc
	}
	wg.Go(func() { start(a, to(la, lb.LocalAddr()), pion.Client) })
	start(b, to(lb, la.LocalAddr()), pion.Server)
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
	var readers sync.WaitGroup
	for _, c := range []*carrier{a, b} {
		readers.Go(func() {
			for {
				s, err := c.assoc.AcceptStream()
				if err != nil {
					return
				}
				c.mu.Lock()
				_, known := c.streams[s.StreamIdentifier()]
				c.streams[s.StreamIdentifier()] = s
				c.mu.Unlock()
				if !known {
					readers.Go(func() { c.read(s) })
				}
			}
		})
	}
	t.Cleanup(func() {
		_ = a.assoc.Close()
		_ = b.assoc.Close()
		readers.Wait()
	})
	return a, b
}

// datagrams is one end of a pair of UDP sockets.
type datagrams struct {
	*net.UDPConn
	peer net.Addr
}

func (d datagrams) Read(b []byte) (int, error) {
	n, _, err := d.ReadFrom(b)
	return n, err
}

func (d datagrams) Write(b []byte) (int, error) { return d.WriteTo(b, d.peer) }

func (c *carrier) read(s *pion.Stream) {
	buf := make([]byte, 1<<16)
	for {
		n, ppid, err := s.ReadSCTP(buf)
		if err != nil {
			return
		}
		c.in <- Chunk{Stream: s.StreamIdentifier(), PPID: PPID(ppid), Data: bytes.Clone(buf[:n])}
	}
}

// Send implements [Association].
func (c *carrier) Send(k Chunk) error {
	c.mu.Lock()
	s := c.streams[k.Stream]
	if s == nil {
		var err error
		if s, err = c.assoc.OpenStream(k.Stream, pion.PayloadTypeUnknown); err != nil {
			c.mu.Unlock()
			return err
		}
		c.streams[k.Stream] = s
		go c.read(s)
	}
	c.mu.Unlock()
	s.SetReliabilityParams(true, pion.ReliabilityTypeReliable, 0)
	_, err := s.WriteSCTP(k.Data, pion.PayloadProtocolIdentifier(k.PPID))
	return err
}

// do steps the endpoint and hands its chunks over.
func (c *carrier) do(ev SessionEvent) []SessionAction {
	c.t.Helper()
	acts, err := Carry(c, c.Step(nil, ev))
	if err != nil {
		c.t.Fatal(err)
	}
	return acts
}

// wait takes chunks until something is said to the user.
func (c *carrier) wait(want string) []SessionAction {
	c.t.Helper()
	end := time.After(time.Minute)
	for {
		select {
		case k := <-c.in:
			acts := c.do(ChunkIn{k})
			if len(acts) == 0 {
				continue
			}
			if got := told(acts); !strings.HasPrefix(got, want) {
				c.t.Fatalf("got %s, want %s", got, want)
			}
			return acts
		case <-end:
			c.t.Fatalf("waited in vain for %s", want)
		}
	}
}

// segments collects the next n segments. What comes behind them is returned too.
func (c *carrier) segments(n int) (got [][]byte, rest []SessionAction) {
	c.t.Helper()
	for len(got) < n {
		for _, act := range c.wait("SegmentIn") {
			if s, ok := act.(SegmentIn); ok {
				got = append(got, s.Segment)
			} else {
				rest = append(rest, act)
			}
		}
	}
	return got, rest
}

func TestSessionOverSCTP(t *testing.T) {
	for _, swap := range []bool{false, true} {
		for _, o := range []mpa.Options{{}, cs, p2p} {
			t.Run(fmt.Sprintf("enhanced=%v p2p=%v swap=%v", o.Enhanced(), o.PeerToPeer, swap), func(t *testing.T) {
				a, b := associate(t, swap, EndpointOptions{Options: mpa.Options{Depths: mpa.Depths{IRD: 8, ORD: 8}}})
				const messages = 100
				message := func(from string, i int) []byte {
					s := mpa.Segment{Opcode: mpa.OpSend, Last: true, MSN: uint32(i + 1),
						Payload: bytes.Repeat([]byte(from), 1+i*7)}
					return append(s.AppendHeader(nil), s.Payload...)
				}
				for round := range 2 { // the second one uses the stream again
					a.do(SessionConnect{5, o, []byte("hello")})
					q := b.wait("SessionRequest")[0].(SessionRequest)
					expect.MustEqual(t, q.Enhanced, o.Enhanced(), "Enhanced of the request")  // 6581-7-9
					expect.MustEqual(t, string(q.Private), "hello", "Private of the request") // 6581-7-10
					up := b.do(SessionAnswer{Stream: 5, Private: []byte("yes")})[0].(SessionUp)
					// 6581-7-13: the passive side sends first, nobody sends an RTR
					for i := range messages {
						b.do(SessionSend{5, message("passive", i)})
					}
					acts := a.wait("SessionUp")
					res := acts[0].(SessionUp).Result
					expect.MustEqual(t, string(res.Private), "yes", "Private")
					expect.MustEqual(t, res.PeerToPeer, o.PeerToPeer, "PeerToPeer")
					if o.Enhanced() {
						depthsFit(t, res, up.Result)
					}
					for i := range messages {
						a.do(SessionSend{5, message("active", i)})
					}
					for k, c := range []*carrier{a, b} {
						from, got := []string{"passive", "active"}[k], [][]byte(nil)
						if k == 0 { // what waited for the Accept came with it
							for _, act := range acts[1:] {
								got = append(got, act.(SegmentIn).Segment)
							}
						}
						more, rest := c.segments(messages - len(got))
						if len(rest) > 0 {
							t.Fatalf("%s", told(rest))
						}
						for i, s := range append(got, more...) {
							if !bytes.Equal(s, message(from, i)) {
								t.Fatalf("round %d: segment %d of %s: %x", round, i, from, s)
							}
						}
					}
					// 6581-7-12, 6581-7-14
					a.do(SessionClose{5})
					if d := b.wait("SessionDown")[0].(SessionDown); d.Err != nil {
						t.Fatal(d.Err)
					}
					if a.Sessions()+b.Sessions() != 0 {
						t.Fatal("sessions are left")
					}
				}
			})
		}
	}
}

// TestSessionsRefusedOverSCTP: the other two legal sequences, and one that is not
// legal.
func TestSessionsRefusedOverSCTP(t *testing.T) {
	a, b := associate(t, true, EndpointOptions{Options: mpa.Options{Depths: mpa.Depths{MinORD: 16}}, MaxPending: 1})
	// 6581-7-15
	a.do(SessionConnect{1, cs, nil})
	b.wait("SessionRequest")
	b.do(SessionAnswer{Stream: 1, Reject: true, Private: []byte("because")})
	if r := a.wait("SessionRejected")[0].(SessionRejected).Result; string(r.Private) != "because" {
		t.Errorf("%+v", r)
	}
	// 6581-7-3: only because of the depths; the answer says what is needed
	a.do(SessionConnect{2, cs, nil})
	b.wait("SessionRequest")
	b.do(SessionAnswer{Stream: 2})
	if r := a.wait("SessionRejected")[0].(SessionRejected).Result; r.Peer.ORD != 16 {
		t.Errorf("%+v", r)
	}
	// 6581-7-16: one request waits for the user, another is too much
	a.do(SessionConnect{3, cs, nil})
	b.wait("SessionRequest")
	a.do(SessionConnect{4, cs, nil})
	for a.Sessions() == 2 {
		select {
		case k := <-b.in:
			b.do(ChunkIn{k})
		case k := <-a.in:
			a.do(ChunkIn{k})
		case <-time.After(time.Minute):
			t.Fatal("the second request was not refused")
		}
	}
	// 6581-7-17: an unenhanced Accept to an Enhanced Initiate ends the session
	wrong, err := (&Control{Function: FuncAccept}).AppendBinary(nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Send(Chunk{3, PPIDControl, wrong}); err != nil {
		t.Fatal(err)
	}
	if d := a.wait("SessionDown")[0].(SessionDown); d.Err == nil || d.Err.Reason != SessionIllegal {
		t.Errorf("%+v", d)
	}
	b.wait("SessionDown") // by the Terminate of a
}
