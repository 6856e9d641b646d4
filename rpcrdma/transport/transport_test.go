package transport

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/provider/softiwarp"
	"ipoibcm/provider/softroce"
	"ipoibcm/rdmacm"
	"ipoibcm/rpcrdma"
	"ipoibcm/verbs"
)

const (
	patience = time.Minute
	program  = 0x20000077
	port     = 20049
)

var addrs = [2]netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.2")}

func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// carriers are the ways in which two Ends are joined.
var carriers = map[string]func(t *testing.T, client, server Options) (c, s *End){
	"RoCE":  overRoCE,
	"iWARP": overIWARP,
}

func each(t *testing.T, f func(t *testing.T, join func(t *testing.T, client, server Options) (c, s *End))) {
	for name, join := range carriers {
		t.Run(name, func(t *testing.T) { f(t, join) })
	}
}

func roce(t *testing.T, n int) (verbs.Provider, *rdmacm.Port) {
	t.Helper()
	dev, err := softroce.Open(softroce.Options{Underlay: "lo", GID: ib.GID(addrs[n].As16())})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dev.Close() })
	p, err := rdmacm.Open(rdmacm.Options{Provider: dev})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return dev, p
}

func overRoCE(t *testing.T, client, server Options) (c, s *End) {
	t.Helper()
	var cp, sp *rdmacm.Port
	client.Provider, cp = roce(t, 0)
	server.Provider, sp = roce(t, 1)
	l, err := sp.Listen(port)
	if err != nil {
		t.Fatal(err)
	}
	got := make(chan *End, 1)
	go func() {
		defer close(got)
		r, err := l.Next(within(t))
		if err != nil {
			t.Error(err)
			return
		}
		s, err := AcceptRoCE(r, server)
		if err != nil {
			t.Error(err)
			return
		}
		got <- s
	}()
	if c, err = DialRoCE(within(t), cp, addrs[1], port, client); err != nil {
		t.Fatal(err)
	}
	return joined(t, c, <-got)
}

func overIWARP(t *testing.T, client, server Options) (c, s *End) {
	t.Helper()
	var devs [2]*softiwarp.Device
	for i := range devs {
		var err error
		if devs[i], err = softiwarp.Open(softiwarp.Options{Addr: addrs[i], Port: -1}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { devs[i].Close() })
	}
	ln, err := net.Listen("tcp", "127.0.0.2:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	got := make(chan *End, 1)
	go func() {
		defer close(got)
		conn, err := ln.Accept()
		if err != nil {
			t.Error(err)
			return
		}
		s, err := AcceptIWARP(within(t), devs[1], conn, server)
		if err != nil {
			t.Error(err)
			return
		}
		got <- s
	}()
	c, err = DialIWARP(within(t), devs[0], func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", ln.Addr().String())
	}, client)
	if err != nil {
		t.Fatal(err)
	}
	return joined(t, c, <-got)
}

func joined(t *testing.T, c, s *End) (*End, *End) {
	t.Helper()
	t.Cleanup(func() {
		if t.Failed() && s != nil {
			t.Logf("the client ended with %v, the server with %v", c.Err(), s.Err())
		}
	})
	if s == nil {
		t.FailNow()
	}
	t.Cleanup(func() {
		c.Close()
		s.Close()
		for _, e := range []*End{c, s} {
			expect.Equal(t, e.memory == nil, true, "left: memory == nil")
			expect.Equal(t, e.work == nil, true, "left: work == nil")
			expect.Equal(t, len(e.calls), 0, "left: length of calls")
		}
	})
	return c, s
}

// Octets of the heads of calls and replies without authentication.
const callHead, replyHead = 40, 24

// Procedures of the test's program.
const (
	procNULL  = 0
	procEcho  = 1 // returns its argument, an opaque
	procMake  = 2 // returns an opaque of as many octets as its argument says
	procSleep = 3 // answers when the connection has ended
)

// opaque is XDR of an opaque of n octets that can be told from others.
func opaque(n int) []byte {
	b := binary.BigEndian.AppendUint32(nil, uint32(n))
	for i := range (n + 3) &^ 3 {
		if i < n {
			b = append(b, byte(i*7+i>>8))
		} else {
			b = append(b, 0)
		}
	}
	return b
}

// serve is the test's program. The opaque in a result is what may be written by itself.
func serve(ctx context.Context, s rpcrdma.Serve) rpcrdma.Event {
	call, args, err := rpcrdma.ParseRPCCall(s.Payload)
	reply := rpcrdma.RPCReply{}
	if err != nil || call.Prog != program {
		reply.Status = rpcrdma.RPCProgUnavail
		return rpcrdma.Answer{Payload: reply.Append(nil)}
	}
	head := reply.Append(nil)
	switch call.Proc {
	case procEcho:
		head = append(head, args...)
	case procMake:
		head = append(head, opaque(int(binary.BigEndian.Uint32(args)))...)
	case procSleep:
		<-ctx.Done()
	}
	a := rpcrdma.Answer{Payload: head}
	if call.Proc == procMake && len(s.Results) == 1 {
		if n := int(binary.BigEndian.Uint32(args)); n > 0 {
			a.Reduce = []rpcrdma.Span{{Offset: replyHead + 4, Len: n}} // behind its length
		}
	}
	return a
}

func call(proc uint32, args ...byte) []byte {
	return append((&rpcrdma.RPCCall{Prog: program, Vers: 1, Proc: proc}).Append(nil), args...)
}

func word(v int) []byte { return binary.BigEndian.AppendUint32(nil, uint32(v)) }

// result is the results of a reply that says success.
func result(t *testing.T, r Reply, err error) []byte {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	head, results, err := rpcrdma.ParseRPCReply(r.Payload)
	if err != nil || head.Status != rpcrdma.RPCSuccess {
		t.Fatalf("%+v, %v", head, err)
	}
	return results
}

// Calls of every size and form, in both versions: inline; the whole call or the
// whole reply by chunks; an argument that the server READs, a result that it
// WRITEs.
func TestCalls(t *testing.T) {
	each(t, func(t *testing.T, join func(*testing.T, Options, Options) (*End, *End)) {
		for _, v := range []rpcrdma.Version{rpcrdma.Version1, rpcrdma.Version2} {
			t.Run(fmt.Sprint("version ", v), func(t *testing.T) {
				c, s := join(t, Options{RPC: rpcrdma.Options{MaxVersion: v}}, Options{Serve: serve})
				ctx := within(t)
				if got := result2(t)(c.Call(ctx, rpcrdma.Submit{Payload: call(procNULL)})); len(got) != 0 {
					t.Errorf("NULL returned %x", got)
				}
				switch i := c.Info(); {
				case i.Version != v:
					t.Errorf("Version is %v, want %v", i.Version, v)
				case !i.Settled:
					t.Errorf("Settled is false, want true")
				case i.Granted == 0:
					t.Errorf("0 credits are granted, want some")
				case i.PeerAt < 0:
					t.Errorf("PeerAt is %v, want at least 0", i.PeerAt)
				case i.SendInline != 4096:
					t.Errorf("SendInline is %v, want 4096", i.SendInline)
				}
				for _, n := range []int{0, 1, 999, 4000, 5001, 60000, 300001} {
					arg := opaque(n)
					for _, by := range []string{"position zero", "argument"} {
						req := rpcrdma.Submit{Payload: call(procEcho, arg...), MaxReply: replyHead + len(arg)}
						if by == "argument" && n > 0 {
							req.Reduce = []rpcrdma.Span{{Offset: callHead + 4, Len: n}}
						}
						if got := result2(t)(c.Call(ctx, req)); !bytes.Equal(got, arg) {
							t.Errorf("%d octets by %s: %d octets came back", n, by, len(got))
						}
					}
					req := rpcrdma.Submit{Payload: call(procMake, word(n)...), Results: []int{max(4, n)}, MaxReply: replyHead + 4}
					r, err := c.Call(ctx, req)
					inline := result(t, r, err)
					// Without its padding if it was written by itself.
					if got := append(inline, bytes.Join(r.Results, nil)...); len(got) < 4+n || !bytes.Equal(got, arg[:len(got)]) {
						t.Errorf("%d octets of a result: %d came, %d of them inline", n, len(got), len(inline))
					}
					if n > 5000 && len(inline) != 4 {
						t.Errorf("%d octets of a result came inline", len(inline))
					}
				}
				for _, e := range []*End{c, s} {
					e.mu.Lock()
					if len(e.memory)+len(e.reads) != 0 {
						t.Error("memory is left")
					}
					e.mu.Unlock()
				}
			})
		}
	})
}

// result2 is result for use around a call.
func result2(t *testing.T) func(Reply, error) []byte {
	return func(r Reply, err error) []byte {
		t.Helper()
		return result(t, r, err)
	}
}

// A client that offers version two meets a server of version one only.
func TestVersionOneServer(t *testing.T) {
	each(t, func(t *testing.T, join func(*testing.T, Options, Options) (*End, *End)) {
		versions := new(Versions)
		for i, refused := range []rpcrdma.Version{rpcrdma.Version2, 0} { // asked by version two once only
			t.Run(fmt.Sprint("connection ", i), func(t *testing.T) {
				c, _ := join(t, Options{Versions: versions, Peer: "server", RPC: rpcrdma.Options{Program: program, ProgVersion: 1}},
					Options{RPC: rpcrdma.Options{MaxVersion: rpcrdma.Version1}, Serve: serve})
				select {
				case <-c.Ready():
				case <-within(t).Done():
					t.Fatalf("connection %d: the version is not settled", i)
				}
				expect.Equal(t, c.Info().Version, rpcrdma.Version1, "version")
				expect.Equal(t, c.Info().Refused, refused, "refused version")
			})
		}
	})
}

// TestRememberedVersionNotSpoken: clients that share what they know of a peer need not speak the same
// versions.
func TestRememberedVersionNotSpoken(t *testing.T) {
	p, _ := roce(t, 0)
	versions := new(Versions)
	versions.learn("server", rpcrdma.Learned{Version: rpcrdma.Version1})
	for _, tt := range []struct {
		name string
		o    rpcrdma.Options
		want rpcrdma.Version
	}{
		{"both versions", rpcrdma.Options{}, rpcrdma.Version1},
		{"version one only", rpcrdma.Options{MaxVersion: rpcrdma.Version1}, rpcrdma.Version1},
		{"version two only", rpcrdma.Options{MinVersion: rpcrdma.Version2}, rpcrdma.Version2},
	} {
		tt.o.Client = true
		e, err := New(Options{Provider: p, Versions: versions, Peer: "server", RPC: tt.o})
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		expect.Equal(t, e.Info().Version, tt.want, "%s: version to begin with", tt.name)
		e.Close()
	}
}

// TestUnnamedPeer: nothing is remembered of a peer without a name, because the next one may be another.
func TestUnnamedPeer(t *testing.T) {
	versions := new(Versions)
	for i := range 2 {
		c, _ := overIWARP(t, Options{Versions: versions, RPC: rpcrdma.Options{Program: program, ProgVersion: 1}},
			Options{RPC: rpcrdma.Options{MaxVersion: rpcrdma.Version1}, Serve: serve})
		select {
		case <-c.Ready():
		case <-within(t).Done():
			t.Fatalf("connection %d: the version is not settled", i)
		}
		expect.Equal(t, c.Info().Refused, rpcrdma.Version2, "connection %d: refused version", i)
	}
}

// TestOwnEndTeachesNothing: V2-6.2-3. A client that ends the connection itself does not conclude from the
// missing answer that the peer is of version one.
func TestOwnEndTeachesNothing(t *testing.T) {
	each(t, func(t *testing.T, join func(*testing.T, Options, Options) (*End, *End)) {
		for name, end := range map[string]func(*End){
			"closed": (*End).Close,
			"failed": func(c *End) {
				c.mu.Lock()
				c.fail(verbs.ErrNoResources)
				c.mu.Unlock()
				<-c.Done()
			},
		} {
			t.Run(name, func(t *testing.T) {
				versions, asked := new(Versions), make(chan struct{})
				c, _ := join(t, Options{Versions: versions, Peer: "server", RPC: rpcrdma.Options{Program: program, ProgVersion: 1}},
					Options{Serve: func(ctx context.Context, _ rpcrdma.Serve) rpcrdma.Event {
						close(asked)
						<-ctx.Done()
						return nil
					}})
				<-asked
				end(c)
				expect.Equal(t, versions.start("server"), 0, "%s: version to begin with", name)
			})
		}
	})
}

// More calls at once than there are credits: all are answered.
func TestManyCalls(t *testing.T) {
	each(t, func(t *testing.T, join func(*testing.T, Options, Options) (*End, *End)) {
		c, _ := join(t, Options{}, Options{Serve: serve, RPC: rpcrdma.Options{Grant: 3}})
		ctx := within(t)
		var wg sync.WaitGroup
		for i := range 60 {
			wg.Go(func() {
				arg := opaque(i * 150) // some inline, some not
				r, err := c.Call(ctx, rpcrdma.Submit{Payload: call(procEcho, arg...), MaxReply: replyHead + len(arg)})
				if err != nil {
					t.Error(err)
					return
				}
				if _, got, err := rpcrdma.ParseRPCReply(r.Payload); err != nil || !bytes.Equal(got, arg) {
					t.Errorf("call %d: %d octets, %v", i, len(got), err)
				}
			})
		}
		wg.Wait()
	})
}

// What all Writes together may hold exceeds an int of 32 bits here.
func TestMuchMayBeHeld(t *testing.T) {
	each(t, func(t *testing.T, join func(*testing.T, Options, Options) (*End, *End)) {
		c, _ := join(t, Options{}, Options{Serve: serve, RPC: rpcrdma.Options{MaxLong: 32 << 20}})
		arg := opaque(9000)
		r, err := c.Call(within(t), rpcrdma.Submit{Payload: call(procEcho, arg...), MaxReply: replyHead + len(arg)})
		if err != nil {
			t.Fatal(err)
		}
		if _, got, err := rpcrdma.ParseRPCReply(r.Payload); err != nil || !bytes.Equal(got, arg) {
			t.Errorf("%d octets, %v; want %d", len(got), err, len(arg))
		}
	})
}

// A call ends with its caller's patience, and with the connection; neither leaves
// anything that a peer could reach.
func TestCallsEnd(t *testing.T) {
	each(t, func(t *testing.T, join func(*testing.T, Options, Options) (*End, *End)) {
		asked := make(chan struct{}, 3) // a call is at the program
		c, s := join(t, Options{}, Options{Serve: func(ctx context.Context, s rpcrdma.Serve) rpcrdma.Event {
			asked <- struct{}{}
			return serve(ctx, s)
		}})
		result2(t)(c.Call(within(t), rpcrdma.Submit{Payload: call(procNULL)}))
		<-asked
		ctx, cancel := context.WithCancel(within(t))
		go func() {
			<-asked
			cancel()
		}()
		if _, err := c.Call(ctx, rpcrdma.Submit{Payload: call(procSleep), Results: []int{9000},
			MaxReply: replyHead + 4}); !errors.Is(err, context.Canceled) {
			t.Errorf("a call without an answer: %v", err)
		}
		c.mu.Lock()
		if len(c.memory) != 0 {
			t.Error("memory of a cancelled call can be reached")
		}
		c.mu.Unlock()
		ended := make(chan error)
		go func() {
			_, err := c.Call(within(t), rpcrdma.Submit{Payload: call(procSleep), Results: []int{9000}, MaxReply: replyHead + 4})
			ended <- err
		}()
		<-asked
		s.Close()
		var ce *CallError
		if err := <-ended; !errors.As(err, &ce) || ce.Reason != rpcrdma.ReasonDisconnected {
			t.Errorf("the call of a lost connection: %v", err)
		}
		select {
		case <-c.Done():
		case <-within(t).Done():
			t.Fatal("the client does not end")
		}
		if c.Err() == nil || errors.Is(c.Err(), ErrClosed) {
			t.Error(c.Err())
		}
		if _, err := c.Call(within(t), rpcrdma.Submit{Payload: call(procNULL)}); err == nil {
			t.Error("a call after the end")
		}
	})
}

// A program that nobody serves.
func TestNoProgram(t *testing.T) {
	each(t, func(t *testing.T, join func(*testing.T, Options, Options) (*End, *End)) {
		c, _ := join(t, Options{}, Options{})
		r, err := c.Call(within(t), rpcrdma.Submit{Payload: call(procNULL)})
		if err != nil {
			t.Fatal(err)
		}
		if head, _, err := rpcrdma.ParseRPCReply(r.Payload); err != nil || head.Status != rpcrdma.RPCProgUnavail {
			t.Errorf("%+v, %v", head, err)
		}
	})
}

// An End that is never connected gives back what it took.
func TestNeverConnected(t *testing.T) {
	p, _ := roce(t, 0)
	e, err := New(Options{Provider: p})
	if err != nil {
		t.Fatal(err)
	}
	e.Close()
	e.Close()
	if _, err := New(Options{Provider: p, RPC: rpcrdma.Options{SendSize: 7}}); err == nil {
		t.Error("a send size of 7 was taken")
	}
}

// TestDeafPeer: what a peer asks for and does not take is bounded.
func TestDeafPeer(t *testing.T) {
	p, _ := roce(t, 0)
	e, err := New(Options{Provider: p})
	if err != nil {
		t.Fatal(err)
	}
	e.mu.Lock()
	e.closed = true // nothing leaves the queue
	for range e.most {
		e.send(rpcrdma.Send{Data: make([]byte, 20)})
	}
	n := len(e.queue)
	if e.ctx.Err() != nil || n != e.most {
		t.Errorf("%d of %d queued, %v", n, e.most, context.Cause(e.ctx))
	}
	e.send(rpcrdma.Send{Data: make([]byte, 20)})
	if len(e.queue) != n {
		t.Errorf("%d queued, at most %d", len(e.queue), n)
	}
	e.mu.Unlock()
	wantDeaf(t, e)
}

// wantDeaf waits for the end of e because its peer acknowledges nothing.
func wantDeaf(t *testing.T, e *End) {
	t.Helper()
	select {
	case <-e.Done():
	case <-time.After(patience):
		t.Fatal("it goes on")
	}
	if !errors.Is(e.Err(), ErrDeaf) {
		t.Errorf("ended with %v", e.Err())
	}
}

// TestDeafPeerMemory: so are the octets of replies that it does not acknowledge.
func TestDeafPeerMemory(t *testing.T) {
	p, _ := roce(t, 0)
	e, err := New(Options{Provider: p, RPC: rpcrdma.Options{Ask: 1, Grant: 1}})
	if err != nil {
		t.Fatal(err)
	}
	long := rpcrdma.Write{Segments: []rpcrdma.Segment{{Handle: 1, Length: 1 << 20}}, Data: make([]byte, 1<<20)}
	e.mu.Lock()
	e.closed = true // nothing leaves the queue
	sends, _ := e.machine.SendBuffers()
	for range 2*sends + 1 {
		e.write(long)
	}
	if n := len(e.queue); n != 2*sends {
		t.Errorf("%d of 1 MiB are queued", n)
	}
	e.mu.Unlock()
	wantDeaf(t, e)
}

// poor is a provider that has no memory left.
type poor struct{ verbs.Provider }

func (poor) Alloc(int) (*verbs.Region, error) { return nil, verbs.ErrNoResources }

// A reply whose results could not be written is not sent: its header would say
// that they were.
func TestNoMemoryForReply(t *testing.T) {
	each(t, func(t *testing.T, join func(*testing.T, Options, Options) (*End, *End)) {
		c, s := join(t, Options{}, Options{Serve: serve})
		result2(t)(c.Call(within(t), rpcrdma.Submit{Payload: call(procNULL)}))
		s.mu.Lock()
		s.opt.Provider = poor{s.opt.Provider}
		s.mu.Unlock()
		r, err := c.Call(within(t), rpcrdma.Submit{Payload: call(procMake, word(9000)...), Results: []int{9000},
			MaxReply: replyHead + 4})
		if err == nil {
			t.Errorf("%d results, of which nothing was written", len(r.Results))
		}
		if ends := s.Err(); ends != nil && !errors.Is(ends, verbs.ErrNoResources) {
			t.Error(ends)
		}
	})
}

// mute is a queue pair that takes no work request.
type mute struct{ verbs.QP }

var errMute = errors.New("nothing can be posted")

func (mute) PostSend([]verbs.SendWR) (int, error) { return 0, errMute }

// TestNoReply: V2-R1-14. A responder that can send neither a reply nor an error
// closes the connection, so that the requester knows that the reply was lost.
func TestNoReply(t *testing.T) {
	each(t, func(t *testing.T, join func(*testing.T, Options, Options) (*End, *End)) {
		for name, req := range map[string]rpcrdma.Submit{
			"a reply":  {Payload: call(procNULL)},
			"an error": {Payload: call(procMake, word(9000)...), MaxReply: replyHead},
		} {
			t.Run(name, func(t *testing.T) {
				c, s := join(t, Options{}, Options{Serve: serve})
				result2(t)(c.Call(within(t), rpcrdma.Submit{Payload: call(procNULL)}))
				s.mu.Lock()
				s.qp = mute{s.qp}
				s.mu.Unlock()
				req.Timeout = time.Hour
				ctx := within(t)
				_, err := c.Call(ctx, req)
				var ce *CallError
				if !errors.As(err, &ce) || ce.Reason != rpcrdma.ReasonDisconnected {
					t.Errorf("%s: the call ended with %v, want that the connection has ended", name, err)
				}
				select {
				case <-s.Done():
				case <-ctx.Done():
					t.Fatalf("%s: the responder keeps the connection", name)
				}
				if !errors.Is(s.Err(), errMute) {
					t.Errorf("%s: ended with %v, want %v", name, s.Err(), errMute)
				}
			})
		}
	})
}

// sticky is a provider that takes no memory back that a peer can reach.
type sticky struct{ verbs.Provider }

var errSticky = errors.New("the memory stays")

func (sticky) Deregister(*verbs.Region) error { return errSticky }

// TestMemoryStaysExposed: V2-R1-14. A requester that cannot take the memory of a
// call back has stopped the queue pair before the call ends.
func TestMemoryStaysExposed(t *testing.T) {
	each(t, func(t *testing.T, join func(*testing.T, Options, Options) (*End, *End)) {
		c, _ := join(t, Options{}, Options{Serve: serve})
		result2(t)(c.Call(within(t), rpcrdma.Submit{Payload: call(procNULL)}))
		goOn := make(chan struct{})
		c.mu.Lock()
		c.opt.Provider = sticky{c.opt.Provider}
		unbind := c.unbind
		c.unbind = func() { // the end of the connection takes its time
			<-goOn
			unbind()
		}
		c.mu.Unlock()
		// Two pieces of memory, of which the reply invalidates one at most.
		arg := opaque(9000)
		_, err := c.Call(within(t), rpcrdma.Submit{Payload: call(procEcho, arg...), MaxReply: replyHead + len(arg)})
		if got := c.qp.State(); got != verbs.StateError {
			t.Errorf("the call ended (%v) while the queue pair was in %v", err, got)
		}
		close(goOn)
		select {
		case <-c.Done():
		case <-within(t).Done():
			t.Fatal("the requester keeps the connection")
		}
		if !errors.Is(c.Err(), errSticky) {
			t.Errorf("ended with %v, want %v", c.Err(), errSticky)
		}
	})
}
