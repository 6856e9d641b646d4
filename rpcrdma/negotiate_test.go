package rpcrdma

import (
	"fmt"
	"testing"
	"time"

	"ipoibcm/internal/expect"
)

// The first message of a client, what becomes of it, and the script that shows it:
//
//	version offered   what comes             then                                               script
//	2                 reply                  version two, 4096 octets both ways                 negotiation-two
//	2                 ERR_VERS with 1        version one, RFC 8797's thresholds, new XID        negotiation-one
//	2                 ERR_VERS without 1     closed, remembered                                 negotiation-range
//	2                 another error          version one is assumed                             negotiation-lost
//	2                 nothing, to NULL       version one is assumed after NegotiateTimeout      negotiation-lost
//	2                 nothing, to a call     the same, on the next connection                   negotiation-slow
//	2                 the connection ends    version one is assumed on the next connection      negotiation-cache
//	1                 reply                  version one                                        negotiation-one
//	1                 nothing, an error      closed                                             negotiation-lost

// TestNegotiation runs testdata/negotiation-*.txt.
//
//	negotiation-two         V2-6-1, V2-6-3, V2-6.1-1, V2-6.1-2, V2-2.1-2; version two has its own thresholds:
//	                        V2-2.1-3, V2-2.3-3
//	negotiation-one         V2-6.2-1, V2-6.2-2, V2-6.2-5, V2-6.3-2; without private data: V2-R1-4, 8797-3.1-3,
//	                        8797-1-1; other sizes: 8797-4.2-4, 8797-7-1; a client of version one: V2-6.3-1, V2-1-1
//	negotiation-range       V2-6.2-2; the credits of an error do not count: V2-6-2
//	negotiation-lost        V2-6.2-4, V2-6-2
//	negotiation-call        nothing is lost: V2-6-2, V2-R1-5
//	negotiation-slow        V2-6.2-4; a call of the user goes out once
//	negotiation-cache       V2-6.2-3
//	negotiation-reconnect   8797-4-2, 8797-4-3
func TestNegotiation(t *testing.T) { playScripts(t, "negotiation-*") }

// TestBadOptions: 8797-4.2-6, 8797-7-1. Options that cannot be announced are refused.
func TestBadOptions(t *testing.T) {
	for _, o := range []Options{{SendSize: 1023}, {RecvSize: 1}, {MinVersion: 2, MaxVersion: 1}, {MaxVersion: 3},
		{Start: 2, MaxVersion: 1}, {Ask: 1 << 20}, {MaxCalls: -1}} {
		if _, err := NewConn(o); err == nil {
			t.Errorf("%+v was taken", o)
		}
	}
}

func TestVersionCache(t *testing.T) {
	var c VersionCache
	for _, v := range []Version{0, 2} {
		c.Learn("peer", t0, Learned{Version: 1})
		c.Learn("peer", t0, Learned{Version: v})
		expect.Equal(t, c.Start("peer", t0), 0, "after version %d: start", v)
		expect.Equal(t, len(c.peers), 0, "after version %d: length of peers", v)
	}
	for i := range VersionCacheSize + 10 {
		c.Learn(fmt.Sprintf("peer %04d", i), t0.Add(time.Duration(i)), Learned{Version: 1})
	}
	expect.Equal(t, len(c.peers), VersionCacheSize, "length of peers")
	expect.Equal(t, c.Evicted, 10, "Evicted")
	for i, want := range map[int]Version{9: 0, 10: 1, VersionCacheSize + 9: 1} {
		if v := c.Start(fmt.Sprintf("peer %04d", i), t0.Add(time.Minute)); v != want {
			t.Errorf("peer %d: %d, want %d", i, v, want)
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
