package transport

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"ipoibcm/rpcrdma"
	"ipoibcm/verbs"
)

// A spy is a provider, and a queue pair of it, that notes what is asked of them.
type spy struct {
	verbs.Provider
	verbs.QP
	mu   sync.Mutex
	said []string
	// back is told what is given back, just before that.
	back func(r *verbs.Region)
}

func (s *spy) note(what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.said = append(s.said, what)
}

func (s *spy) notes() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.said)
}

// accessNames are the rights of peers.
var accessNames = map[verbs.Access]string{verbs.RemoteRead: "read", verbs.RemoteWrite: "write"}

func (s *spy) Register(buf []byte, access verbs.Access) (*verbs.Region, error) {
	s.note("register " + accessNames[access])
	return s.Provider.Register(buf, access)
}

func (s *spy) Deregister(r *verbs.Region) error {
	s.note("deregister")
	if s.back != nil {
		s.back(r)
	}
	return s.Provider.Deregister(r)
}

func (s *spy) Modify(a verbs.QPAttr) error {
	if a.State == verbs.StateError {
		s.note("stop")
	}
	return s.QP.Modify(a)
}

// watch puts a spy between an End and its provider.
func watch(e *End) *spy {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := &spy{Provider: e.opt.Provider, QP: e.qp}
	e.opt.Provider, e.qp = s, s
	return s
}

// TestAccess: memory that a peer reads cannot be written, and the other way round
// (RFC 8166 section 8.1): the peer has no more rights than the call gives it.
func TestAccess(t *testing.T) {
	each(t, func(t *testing.T, join func(*testing.T, Options, Options) (*End, *End)) {
		c, _ := join(t, Options{}, Options{Serve: serve})
		result2(t)(c.Call(within(t), rpcrdma.Submit{Payload: call(procNULL)}))
		s := watch(c)
		arg := opaque(9000)
		result2(t)(c.Call(within(t), rpcrdma.Submit{Payload: call(procEcho, arg...), MaxReply: replyHead + len(arg),
			Reduce: []rpcrdma.Span{{Offset: callHead + 4, Len: 9000}}}))
		want := []string{"register read", "register write", "deregister", "deregister"}
		if got := s.notes(); !slices.Equal(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	})
}

// TestInvalidatedIsTakenBack: 8797-3.2-2, V2-5.2.3-6. Memory whose handle the reply
// has invalidated counts as taken back, though the provider says otherwise.
func TestInvalidatedIsTakenBack(t *testing.T) {
	each(t, func(t *testing.T, join func(*testing.T, Options, Options) (*End, *End)) {
		for _, v := range []rpcrdma.Version{rpcrdma.Version1, rpcrdma.Version2} {
			t.Run(fmt.Sprint("version ", v), func(t *testing.T) {
				c, _ := join(t, Options{RPC: rpcrdma.Options{MaxVersion: v}}, Options{Serve: serve})
				result2(t)(c.Call(within(t), rpcrdma.Submit{Payload: call(procNULL)}))
				c.mu.Lock()
				c.opt.Provider = sticky{c.opt.Provider}
				c.mu.Unlock()
				for range 2 {
					req := rpcrdma.Submit{Payload: call(procMake, word(9000)...), Results: []int{9000}, MaxReply: replyHead + 4}
					if _, err := c.Call(within(t), req); err != nil {
						t.Fatalf("version %d: %v", v, err)
					}
				}
				if err := c.Err(); err != nil {
					t.Errorf("version %d: ended with %v", v, err)
				}
			})
		}
	})
}

// TestSegmentsAreReadTogether: a READ of several segments is done when all are
// there, in their order (RFC 8166 section 3.4.4).
func TestSegmentsAreReadTogether(t *testing.T) {
	each(t, func(t *testing.T, join func(*testing.T, Options, Options) (*End, *End)) {
		c, s := join(t, Options{}, Options{Serve: serve})
		result2(t)(c.Call(within(t), rpcrdma.Submit{Payload: call(procNULL)}))
		var segments []rpcrdma.Segment
		var want []byte
		for i, n := range []int{10, 300000, 7, 200000} {
			buf := bytes.Repeat([]byte{byte(i + 1)}, n)
			r, err := c.opt.Provider.Register(buf, verbs.RemoteRead)
			if err != nil {
				t.Fatal(err)
			}
			segments = append(segments, rpcrdma.Segment{Handle: r.RKey, Length: uint32(n), Offset: r.Addr})
			want = append(want, buf...)
		}
		done := make(chan []byte, 1)
		sp := watch(s)
		s.mu.Lock()
		s.read(rpcrdma.Read{Read: 77, Segments: segments, Len: len(want)})
		region := s.reads[77].region
		sp.back = func(r *verbs.Region) { // as soon as the machine has been given the octets
			if r == region && len(done) == 0 {
				done <- bytes.Clone(r.Buf[:len(want)])
			}
		}
		s.post()
		s.mu.Unlock()
		select {
		case got := <-done:
			if !bytes.Equal(got, want) {
				t.Error("the READ was done before all its octets were there")
			}
		case <-within(t).Done():
			t.Error("the READ does not end")
		}
	})
}

// TestStopsBeforeItTakesBack: when a connection ends its queue pair stops before
// memory of its calls is given back, whose addresses somebody else may get.
func TestStopsBeforeItTakesBack(t *testing.T) {
	each(t, func(t *testing.T, join func(*testing.T, Options, Options) (*End, *End)) {
		c, _ := join(t, Options{}, Options{Serve: serve})
		result2(t)(c.Call(within(t), rpcrdma.Submit{Payload: call(procNULL)}))
		s := watch(c)
		ended := make(chan error, 1)
		go func() {
			_, err := c.Call(within(t), rpcrdma.Submit{Payload: call(procSleep), Results: []int{9000}, MaxReply: replyHead + 4})
			ended <- err
		}()
		for end := time.Now().Add(patience); len(s.notes()) == 0 && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
		}
		c.Close()
		if err := <-ended; err == nil || errors.Is(err, errSticky) {
			t.Errorf("the call ended with %v", err)
		}
		got := s.notes()
		switch {
		case len(got) < 3:
			t.Errorf("got has %v elements, want at least 3", len(got))
		case got[0] != "register write":
			t.Errorf("got[0] is %q, want \"register write\"", got[0])
		case got[1] != "stop":
			t.Errorf("got[1] is %q, want \"stop\"", got[1])
		case got[2] != "deregister":
			t.Errorf("got[2] is %q, want \"deregister\"", got[2])
		}
	})
}
