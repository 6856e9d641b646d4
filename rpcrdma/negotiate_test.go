package rpcrdma

import (
	"fmt"
	"testing"
	"time"

	"ipoibcm/internal/expect"
)

// The first message of a client, and what becomes of it:
//
//	version offered   what comes             then
//	2                 reply                  version two, 4096 octets both ways
//	2                 ERR_VERS with 1        version one, RFC 8797's thresholds, new XID
//	2                 ERR_VERS without 1     closed, remembered
//	2                 another error          version one is assumed
//	2                 nothing                version one is assumed after NegotiateTimeout
//	2                 the connection ends    version one is assumed on the next connection
//	1                 reply                  version one
//	1                 nothing, an error      closed
func TestNegotiation(t *testing.T) {
	old := Options{MaxVersion: 1}
	for _, tt := range []struct {
		name   string
		client Options
		server Options
		lose   bool
		want   string // what the client sends, learns and tells
	}{
		// V2-6-1, V2-6-3, V2-6.1-1, V2-6.1-2, V2-2.1-2
		{"both have version two", nfs4, Options{}, false,
			"v2 MSG 76; learned 2; ready v2 4096/4096"},
		// V2-6.2-1, V2-6.2-2, V2-6.2-5, V2-6.3-2: the range is 1-1
		{"a responder of version one", nfs4, old, false,
			"v2 MSG 76; learned 1; v1 MSG 68; ready v1 4096/4096 refused 2"},
		// V2-R1-4, 8797-3.1-3, 8797-1-1: without private data it is 1024
		{"a silent one", nfs4, Options{MaxVersion: 1, Silent: true}, false,
			"v2 MSG 76; learned 1; v1 MSG 68; ready v1 1024/1024 refused 2"},
		// 8797-1-1: the three other combinations
		{"a silent client", Options{Program: 100003, Silent: true}, old, false,
			"v2 MSG 76; learned 1; v1 MSG 68; ready v1 1024/1024 refused 2"},
		{"both are silent", Options{Program: 100003, Silent: true}, Options{MaxVersion: 1, Silent: true}, false,
			"v2 MSG 76; learned 1; v1 MSG 68; ready v1 1024/1024 refused 2"},
		// 8797-4.2-4, 8797-7-1
		{"other sizes", Options{Program: 100003, SendSize: 65536, RecvSize: 2048},
			Options{MaxVersion: 1, SendSize: 8192, RecvSize: 16384}, false,
			"v2 MSG 76; learned 1; v1 MSG 68; ready v1 16384/2048 refused 2"},
		// Version two has its own thresholds (V2-2.1-3, V2-2.3-3).
		{"other sizes in version two", Options{Program: 100003, SendSize: 65536, RecvSize: 65536},
			Options{SendSize: 65536, RecvSize: 65536}, false,
			"v2 MSG 76; learned 2; ready v2 4096/4096"},
		// V2-6.3-1, V2-1-1
		{"a client of version one", Options{Program: 100003, MaxVersion: 1}, Options{}, false,
			"v1 MSG 68; ready v1 4096/4096"},
		{"a client that remembers", Options{Program: 100003, Start: 1}, old, false,
			"v1 MSG 68; ready v1 4096/4096"},
		{"nothing in common", Options{Program: 100003, MinVersion: 2}, old, false,
			"v2 MSG 76; learned 0; close no_version"},
		{"nothing in common, from below", Options{Program: 100003, MaxVersion: 1}, Options{MinVersion: 2}, false,
			"v1 MSG 68; learned 0; close no_version"},
		// A memory that is out of date: the peer has given up version one.
		{"only version two is left", Options{Program: 100003, Start: 1}, Options{MinVersion: 2}, false,
			"v1 MSG 68; learned 2; v2 MSG 76; learned 2; ready v2 4096/4096 refused 1"},
		// V2-6.2-4: after 5 s, and no loop
		{"all is lost", nfs4, Options{}, true,
			"v2 MSG 76; learned 1 assumed; v1 MSG 68; close timeout"},
		{"all is lost, and version two is asked for", Options{Program: 100003, MinVersion: 2}, Options{}, true,
			"v2 MSG 76; close timeout"},
	} {
		w := pair(t, tt.client, tt.server)
		if tt.lose {
			w.lose = func(*end, *Header) bool { return true }
		}
		got := ""
		w.client().notify = func(a Action) {
			if got != "" {
				got += "; "
			}
			got += brief(a)
		}
		w.connect().run(time.Minute)
		if got != tt.want {
			w.Fatalf("%s:\n got %s\nwant %s", tt.name, got, tt.want)
		}
		if w.violations > 0 {
			w.Fatalf("%s: %d violations", tt.name, w.violations)
		}
	}
}

func brief(a Action) string {
	switch a := a.(type) {
	case Send:
		h, _, _ := ParseHeader(a.Data)
		return fmt.Sprintf("v%d %v %d", h.Vers, h.Proc, len(a.Data))
	case Learned:
		if a.Assumed {
			return fmt.Sprintf("learned %d assumed", a.Version)
		}
		return fmt.Sprintf("learned %d", a.Version)
	case Ready:
		s := fmt.Sprintf("ready v%d %d/%d", a.Info.Version, a.Info.SendInline, a.Info.RecvInline)
		if a.Info.Refused != 0 {
			s += fmt.Sprintf(" refused %d", a.Info.Refused)
		}
		return s
	case Close:
		return "close " + a.Err.Reason.String()
	}
	return fmt.Sprintf("%T", a)
}

// TestNothingIsLost: a refused call of the user's is sent again, as version one,
// with another XID.
func TestNothingIsLost(t *testing.T) {
	w := pair(t, Options{}, Options{MaxVersion: 1}).connect()
	c := w.client()
	c.step(Submit{ID: 1, Payload: rpc(100)})
	c.step(Submit{ID: 2, Payload: rpc(200)})
	if len(c.sends) != 1 {
		w.Fatalf("%d messages before the first was answered", len(c.sends)) // V2-6-2
	}
	w.run(time.Second)
	for id, n := range map[uint64]int{1: 100, 2: 200} {
		if d := c.result(id); d.Err != nil || string(d.Payload[24:]) != string(args(n)) {
			w.Fatalf("call %d: %v, %d octets", id, d.Err, len(d.Payload))
		}
	}
	first, _ := c.header(0)
	second, payload := c.header(1)
	switch { // V2-R1-5
	case first.XID == second.XID:
		w.Fatalf("both headers have XID %v, want one each", first.XID)
	case second.Vers != 1:
		w.Fatalf("Vers is %v, want 1", second.Vers)
	case xidOf(payload) != second.XID:
		w.Fatalf("xidOf(payload) is %v, want %v", xidOf(payload), second.XID)
	}
	if len(w.server().serves) != 2 {
		w.Fatalf("%d calls ran", len(w.server().serves))
	}
}

// TestNoLoop: what one connection has learned keeps the next from the same
// refusal (V2-6.2-3).
func TestNoLoop(t *testing.T) {
	for _, tt := range []struct {
		name string
		cut  func(e *end, h *Header) bool // instead of delivering
	}{
		{"cut instead of an answer", func(e *end, h *Header) bool { return h.Vers == 2 && h.Proc == ProcMSG }},
		{"cut behind the refusal", func(e *end, h *Header) bool { return h.Vers == 1 }},
	} {
		var cache VersionCache
		now, offers := t0, ""
		for range 3 {
			start, ok := cache.Start("peer", now)
			w := pair(t, Options{Program: 100003, Start: start}, Options{MaxVersion: 1})
			w.now = now
			attempt := len(offers)
			w.lose = func(e *end, h *Header) bool {
				if attempt < 4 && tt.cut(e, h) {
					defer w.cut(w.server())
					return true
				}
				return false
			}
			w.client().notify = func(a Action) {
				switch a := a.(type) {
				case Learned:
					cache.Learn("peer", w.now, a)
				case Send:
					offers += brief(a)[:2] + " "
				}
			}
			if !ok {
				t.Fatal("the peer was given up")
			}
			w.connect().run(time.Second)
			now = w.now
		}
		if want := map[string]string{"cut instead of an answer": "v2 v1 v1 ",
			"cut behind the refusal": "v2 v1 v1 v1 "}[tt.name]; offers != want {
			t.Errorf("%s: offered %q, want %q", tt.name, offers, want)
		}
		// It is forgotten after a while, so that a peer may learn.
		if v, _ := cache.Start("peer", now.Add(VersionCacheTime-time.Minute)); v != 1 {
			t.Errorf("%s: forgotten early", tt.name)
		}
		if v, ok := cache.Start("peer", now.Add(VersionCacheTime)); v != 0 || !ok {
			t.Errorf("%s: %d %v after %v", tt.name, v, ok, VersionCacheTime)
		}
	}
}

func TestVersionCache(t *testing.T) {
	var c VersionCache
	c.Learn("none", t0, Learned{Version: 0})
	if _, ok := c.Start("none", t0.Add(time.Minute)); ok {
		t.Error("a peer without a common version is offered something")
	}
	c.Learn("none", t0, Learned{Version: 2})
	if v, ok := c.Start("none", t0); v != 0 || !ok {
		t.Errorf("after version two: %d %v", v, ok)
	}
	for i := range VersionCacheSize + 10 {
		c.Learn(fmt.Sprintf("peer %04d", i), t0.Add(time.Duration(i)), Learned{Version: 1})
	}
	if len(c.peers) != VersionCacheSize || c.Evicted != 10 {
		t.Errorf("%d peers, %d evicted", len(c.peers), c.Evicted)
	}
	for i, want := range map[int]Version{9: 0, 10: 1, VersionCacheSize + 9: 1} {
		if v, _ := c.Start(fmt.Sprintf("peer %04d", i), t0.Add(time.Minute)); v != want {
			t.Errorf("peer %d: %d, want %d", i, v, want)
		}
	}
}

// TestRanges: what an ERR_VERS may say, and what a client makes of it.
func TestRanges(t *testing.T) {
	for _, tt := range []struct {
		low, high Version
		vers      Version // in the header of the error
		want      string
	}{
		{1, 1, 2, "learned 1; v1 MSG 68"}, // V2-6.2-2
		{0, 1, 2, "learned 1; v1 MSG 68"},
		{3, 4, 2, "learned 0; close no_version"},
		{0, 0, 2, "learned 0; close no_version"},
		{1, 2, 2, ""}, // it says that it has what it refuses
		{2, 5, 2, ""},
		{5, 3, 2, ""}, // malformed
		{1, 1, 1, ""}, // not the version that we have sent
		{1, 1, 7, ""},
	} {
		w := pair(t, nfs4, Options{}).connect()
		c := w.client()
		got := ""
		c.notify = func(a Action) { got += "; " + brief(a) }
		h, _ := c.header(0)
		e := Header{XID: h.XID, Vers: tt.vers, Credit: 7, Proc: ProcERROR,
			Error: TransportError{Code: ErrVers, Low: tt.low, High: tt.high}}
		b, _ := e.AppendBinary(nil)
		c.step(Recv{Data: b})
		if got = trim(got); got != tt.want {
			w.Fatalf("%d to %d in version %d: got %q, want %q", tt.low, tt.high, tt.vers, got, tt.want)
		}
		if tt.want == "" && c.Counters()[ReasonBadRange] != 1 {
			w.Fatalf("%d to %d: not counted", tt.low, tt.high)
		}
		if c.granted != 0 {
			w.Fatalf("the credits of an error count: %d", c.granted) // V2-6-2
		}
	}
}

func trim(s string) string {
	if len(s) < 2 {
		return ""
	}
	return s[2:]
}

// TestProbeError: an answer that is neither a reply nor ERR_VERS.
func TestProbeError(t *testing.T) {
	w := pair(t, nfs4, Options{}).connect()
	c := w.client()
	c.peer.queue = nil
	for i, want := range []string{"learned 1 assumed; v1 MSG 68", "close peer_error"} {
		got := ""
		c.notify = func(a Action) { got += "; " + brief(a) }
		h, _ := c.header(-1)
		e := Header{XID: h.XID, Vers: h.Vers, Credit: 7, Proc: ProcERROR, Error: TransportError{Code: ErrBadXDR}}
		b, _ := e.AppendBinary(nil)
		c.step(Recv{Data: b})
		if got = trim(got); got != want {
			w.Fatalf("error %d: got %q, want %q", i, got, want)
		}
	}
}

// TestReconnect: nothing of one connection holds on the next (8797-4-2, 8797-4-3).
func TestReconnect(t *testing.T) {
	for _, tt := range []struct {
		server     Options
		send, recv int
		inv        bool
	}{
		{Options{MaxVersion: 1, SendInv: true}, 4096, 4096, true},
		{Options{MaxVersion: 1, SendSize: 2048, RecvSize: 1024}, 1024, 2048, false},
		{Options{MaxVersion: 1, Silent: true, SendInv: true}, 1024, 1024, false},
		{Options{MaxVersion: 1, SendSize: 1 << 20, RecvSize: 1 << 20, SendInv: true}, 8192, 8192, true},
	} {
		w := pair(t, Options{Program: 1, MaxVersion: 1, SendSize: 8192, RecvSize: 8192, RecvInv: true}, tt.server).
			connect().run(time.Second)
		c := w.client()
		if len(c.ready) != 1 {
			w.Fatalf("ready %d times", len(c.ready))
		}
		i := c.ready[0]
		s := w.server().own.SendSize
		expect.MustEqual(w, i.SendInline, min(8192, w.server().own.RecvSize), "SendInline")
		expect.MustEqual(w, i.RecvInline, min(8192, s), "RecvInline")
		expect.MustEqual(w, i.RemoteInv, tt.inv, "RemoteInv")
		if tt.server.SendSize != 0 && (i.SendInline != tt.send || i.RecvInline != tt.recv) {
			w.Fatalf("%+v, want %d and %d", i, tt.send, tt.recv)
		}
		switch silent := tt.server.Silent; {
		case silent != (i.PeerAt < 0):
			w.Fatalf("silent is %v, want %v", silent, i.PeerAt < 0)
		case !silent && i.PeerAt != 3:
			w.Fatalf("PeerAt is %v, want 3", i.PeerAt)
		}
	}
	// 8797-4.2-6, 8797-7-1: options that cannot be announced are refused.
	for _, o := range []Options{{SendSize: 1023}, {RecvSize: 1}, {MinVersion: 2, MaxVersion: 1}, {MaxVersion: 3},
		{Start: 2, MaxVersion: 1}, {Ask: 1 << 20}, {MaxCalls: -1}} {
		if _, err := NewConn(o); err == nil {
			t.Errorf("%+v was taken", o)
		}
	}
}

// TestPrivate: both ends say the same things in the same format, or nothing if
// there is no room (8797-4-1, 8797-4-4).
func TestPrivate(t *testing.T) {
	for _, tt := range []struct {
		name string
		o    Options
		want string
	}{
		{"a client", Options{Client: true, RecvInv: true}, "f6ab0e1801010303"},
		{"a client with memory that must stay", Options{Client: true, RecvInv: true, MixedHandles: true}, "f6ab0e1801000303"},
		{"a client that can send it only", Options{Client: true, SendInv: true}, "f6ab0e1801000303"},
		{"a server", Options{SendInv: true}, "f6ab0e1801010303"},
		{"a server that can receive it only", Options{RecvInv: true}, "f6ab0e1801000303"},
		{"sizes", Options{SendSize: 8200, RecvSize: 1 << 20}, "f6ab0e18010007ff"},
		{"no room", Options{SendSize: 8200, Silent: true}, ""},
		// the version is not known yet
		{"version two only", Options{MinVersion: 2, Client: true}, "f6ab0e1801000303"},
	} {
		c, err := NewConn(tt.o)
		if err != nil {
			t.Fatal(err)
		}
		if got := c.Private(); string(got) != string(unhex(tt.want)) {
			t.Errorf("%s: %x, want %s", tt.name, got, tt.want)
		}
	}
}

// TestNothingLearned: an end that came before anything was asked says nothing of
// the peer, and credits in an error count only once the version is settled.
func TestNothingLearned(t *testing.T) {
	w := pair(t, Options{}, Options{}).connect()
	w.cut(w.server())
	if len(w.client().learned) > 0 {
		w.Fatalf("learned %+v", w.client().learned)
	}

	w = pair(t, Options{}, Options{}).connect()
	c := w.client()
	for i := range 2 {
		c.step(Submit{ID: uint64(i), Payload: rpc(0)})
		h, _ := c.header(-1)
		e := Header{XID: h.XID, Vers: 2, Credit: 7, Proc: ProcERROR, Error: TransportError{Code: ErrBadXDR}}
		b, _ := e.AppendBinary(nil)
		c.peer.queue = nil
		c.step(Recv{Data: b})
		switch d := c.result(uint64(i)); { // V2-6-2
		case d.Err == nil:
			w.Fatalf("Err is nil")
		case c.granted != 0:
			w.Fatalf("granted is %v, want 0", c.granted)
		case c.settled:
			w.Fatalf("settled is true, want false")
		case !c.Deadline().IsZero():
			w.Fatalf("Deadline.IsZero is false, want true")
		}
	}
	// Two versions that refuse each other are no loop.
	w = pair(t, nfs4, Options{}).connect()
	c = w.client()
	for range 5 {
		if c.closed != nil {
			break
		}
		h, _ := c.header(-1)
		other := 3 - h.Vers
		e := Header{XID: h.XID, Vers: h.Vers, Credit: 7, Proc: ProcERROR,
			Error: TransportError{Code: ErrVers, Low: other, High: other}}
		b, _ := e.AppendBinary(nil)
		c.step(Recv{Data: b})
	}
	switch {
	case c.closed == nil:
		w.Fatalf("closed is nil")
	case c.closed.Reason != ReasonNoVersion:
		w.Fatalf("Reason is %v, want %v", c.closed.Reason, ReasonNoVersion)
	case len(c.sends) != 2:
		w.Fatalf("sends has %v elements, want 2", len(c.sends))
	}
}
