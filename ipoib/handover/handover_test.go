package handover

import (
	"fmt"
	"net/netip"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/ipoib"
	"ipoibcm/wire/encap"
)

func sample() State {
	b := encap.LinkAddr{QPN: 0x200, GID: ib.GIDFromAddr(netip.MustParseAddr("fe80::2"))}
	with := b
	with.Flags = encap.FlagRC
	return State{
		Name: "ibcm0", Underlay: "eth0", GUID: 7, PKey: 0xffff, QKey: 0xb1b, Proven: 1,
		Link:     encap.LinkAddr{Flags: encap.FlagRC, QPN: 0x123, GID: ib.GIDFromAddr(netip.MustParseAddr("fe80::1"))},
		Prefixes: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")},
		Memory: ipoib.Memory{
			Neighbours: []ipoib.KnownNeighbour{{Addr: netip.MustParseAddr("10.0.0.2"), Link: with, Router: true}},
			Peers:      []ipoib.KnownPeer{{Link: b, Class: ipoib.ClassLegacy, Left: time.Minute, ViaLeft: time.Second}},
		},
	}
}

// What is written is read again, as it was.
func TestRoundTrip(t *testing.T) {
	want := sample()
	b, err := want.AppendBinary(nil)
	if err != nil {
		t.Fatal(err)
	}
	var got State
	if err := got.UnmarshalBinary(b); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

// What no process of this version writes is refused, with the reason, and nothing of it
// is kept.
func TestRefused(t *testing.T) {
	s := sample()
	b, _ := s.AppendBinary(nil)
	good := string(b)
	for _, tt := range []struct{ name, text, want string }{
		{"garbage", "\x00\x01\x02", "not a state"},
		{"empty", "", "not a state"},
		{"no version", `{"name":"x"}`, "not a state"},
		{"newer", strings.Replace(good, `"version":1`, `"version":2,"news":[1]`, 1), "version 2, and this program knows 1"},
		{"unknown field", strings.Replace(good, `"underlay"`, `"overlay"`, 1), "unknown field"},
		{"cut", good[:len(good)-1], "malformed"},
		{"more", good + "{}", "malformed"},
		{"QPN of QP 1", strings.Replace(good, `"qpn":291`, `"qpn":1`, 1), "QPN 0x1"},
		{"QPN of 25 bits", strings.Replace(good, `"qpn":291`, `"qpn":16777217`, 1), "QPN 0x1000001"},
		{"multicast GID", strings.Replace(good, "fe80::1", "ff02::1", 1), "no host's"},
		{"no name", strings.Replace(good, `"ibcm0"`, `""`, 1), "name of 0"},
		{"multicast neighbour", strings.Replace(good, `"10.0.0.2"`, `"224.0.0.1"`, 1), "no address of a host"},
		{"zone", strings.Replace(good, `"10.0.0.2"`, `"fe80::1%eth0"`, 1), "no address of a host"},
		{"trial", strings.Replace(good, `"proven":1`, `"proven":-1`, 1), "malformed"},
		{"class", strings.Replace(good, `"class":2`, `"class":9`, 1), "class 9"},
		{"time", strings.Replace(good, `"left_ms":60000`, `"left_ms":-1`, 1), "-1 ms"},
		{"too many", strings.Replace(good, `"prefixes":[`,
			`"prefixes":[`+strings.Repeat(`"10.0.0.1/24",`, maxPrefixes), 1), "prefixes: more than 1024"},
	} {
		if tt.text == good {
			t.Errorf("%s: the text was not changed", tt.name)
		}
		var got State
		err := got.UnmarshalBinary([]byte(tt.text))
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
		if !reflect.DeepEqual(got, State{}) {
			t.Errorf("%s: %+v was kept", tt.name, got)
		}
	}
}

// The largest state that the limits allow is within the bound.
func TestLargest(t *testing.T) {
	s := sample()
	for i := range maxNeighbours + 1 {
		a := netip.MustParseAddr(fmt.Sprintf("fd00:1234:5678:9abc:ffff:ffff:%x:%x", 0x8000+i>>16, i&0xffff))
		link := encap.LinkAddr{Flags: encap.FlagRC, QPN: ib.QPN(0x800000 + i), GID: ib.GIDFromAddr(a)}
		s.Memory.Neighbours = append(s.Memory.Neighbours, ipoib.KnownNeighbour{Addr: a, Link: link, Router: true})
		s.Memory.Peers = append(s.Memory.Peers, ipoib.KnownPeer{Link: link.Key(), Class: ipoib.ClassRFC,
			Left: maxLeft, Via: ipoib.ViaInband, ViaLeft: maxLeft})
	}
	b, err := s.AppendBinary(nil)
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(b), `"ip":`); n != maxNeighbours {
		t.Errorf("%d neighbours, want %d: what is too much is left out", n, maxNeighbours)
	}
	t.Logf("%d octets", len(b))
}

// FuzzState: what is read can be written, and reads the same again.
func FuzzState(f *testing.F) {
	s := sample()
	b, _ := s.AppendBinary(nil)
	f.Add(b)
	f.Fuzz(func(t *testing.T, in []byte) {
		var a, b State
		if a.UnmarshalBinary(in) != nil {
			return
		}
		out, err := a.AppendBinary(nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := b.UnmarshalBinary(out); err != nil || !reflect.DeepEqual(a, b) {
			t.Fatalf("round trip: %+v, then %+v (%v)", a, b, err)
		}
	})
}

// What a text makes of itself in memory has a bound: lists of nothing, as many as there is
// room for, are refused at the first that is too much.
func TestListsAreBounded(t *testing.T) {
	s := sample()
	b, _ := s.AppendBinary(nil)
	for _, tt := range []struct{ name, item, want string }{
		{"prefixes", `"10.0.0.0/8",`, "prefixes: more than 1024"},
		{"neighbours", "{},", "neighbours: more than 100000"},
		{"peers", "{},", "peers: more than 100000"},
	} {
		name, item := tt.name, tt.item
		text := []byte(strings.Replace(string(b), `"`+name+`":[`, `"`+name+`":[`+strings.Repeat(item, 400_000), 1))
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		err := new(State).UnmarshalBinary(text)
		runtime.ReadMemStats(&after)
		if err == nil || err.Error() != tt.want {
			t.Errorf("%s: error %v, want %s", name, err, tt.want)
		}
		if got, want := after.TotalAlloc-before.TotalAlloc, uint64(4*len(text)+64<<20); got > want {
			t.Errorf("%s: %d octets of text took %d of memory, want %d at most", name, len(text), got, want)
		}
	}
}
