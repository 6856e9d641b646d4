package control

import (
	"fmt"
	"net/url"
	"slices"
	"testing"
)

func parse(t *testing.T, query string) Page {
	t.Helper()
	q, err := url.ParseQuery(query)
	if err != nil {
		t.Fatal(err)
	}
	p, err := ParsePage(q.Get)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// Pages have every element once, in whatever order the list was, and say when there are
// more.
func TestPages(t *testing.T) {
	var all []Neighbour
	for i := range 25 {
		all = append(all, Neighbour{IP: fmt.Sprintf("10.0.0.%d", i*7%25)})
	}
	var seen []string
	after := ""
	for pages := 1; ; pages++ {
		n := Neighbours{Neighbours: slices.Clone(all)}
		n.Select(parse(t, "limit=10&after="+after))
		for _, e := range n.Neighbours {
			seen = append(seen, e.IP)
		}
		if after = n.Next; after == "" {
			if pages != 3 {
				t.Errorf("%d pages, want 3", pages)
			}
			break
		}
	}
	if len(seen) != 25 {
		t.Errorf("%d elements seen, want 25", len(seen))
	}
	slices.Sort(seen)
	if n := len(slices.Compact(seen)); n != 25 {
		t.Errorf("%d different elements seen, want 25", n)
	}
	n := Neighbours{Neighbours: slices.Clone(all)}
	n.Select(parse(t, "after=10.0.0.99&limit=3")) // behind all, and not there
	if len(n.Neighbours) != 0 {
		t.Errorf("behind the last: %+v", n.Neighbours)
	}
	n = Neighbours{Neighbours: slices.Clone(all)}
	n.Select(Page{})
	if !slices.Equal(n.Neighbours, all) {
		t.Error("without parameters the list is another")
	}
}

// A peer is found by its GID, however it is written, and by any of its addresses.
func TestOnePeer(t *testing.T) {
	for query, want := range map[string]int{"peer=fe80::1": 1, "peer=fe80:0::1": 1, "peer=10.0.0.1": 1,
		"peer=::ffff:10.0.0.1": 1, "peer=10.0.0.9": 0} {
		s := Status{Peers: []Peer{{GID: "fe80::1", Addresses: []string{"10.0.0.1", "fd00::1"}},
			{GID: "fe80::2", Addresses: []string{"10.0.0.2"}}}}
		if s.Select(parse(t, query)); len(s.Peers) != want {
			t.Errorf("%s: %d peers, want %d", query, len(s.Peers), want)
		}
	}
	c := Conns{Conns: []Conn{{Peer: "80 000123 fe80::1"}, {Peer: "80 000123 fe80::2"}}}
	if c.Select(parse(t, "peer=fe80::2")); len(c.Conns) != 1 {
		t.Errorf("%d connections, want 1", len(c.Conns))
	}
	r := Routes{Routes: []Route{{NextHop: "10.0.0.2", Peer: "80 000123 fe80::2"},
		{NextHop: "10.0.0.1", Peer: "80 000123 fe80::1"}}}
	if r.Select(parse(t, "peer=10.0.0.2")); len(r.Routes) != 1 {
		t.Errorf("%d routes, want 1", len(r.Routes))
	}
}

// A peer's connections are on one page, and its key is no identifier of theirs.
func TestPagesOfConns(t *testing.T) {
	var all []Conn
	for i := range 9 {
		all = append(all, Conn{Peer: fmt.Sprintf("80 00012%d fe80::%d", i, i/3), LocalCommID: fmt.Sprintf("0x%08x", i)})
	}
	c := Conns{Conns: slices.Clone(all)}
	c.Select(parse(t, "limit=2"))
	if n := len(c.Conns); n != 3 {
		t.Errorf("%d connections, want the 3 of one peer", n)
	}
	if c.Next != "fe80::0" {
		t.Errorf("next %q, want the peer's GID", c.Next)
	}
	c = Conns{Conns: slices.Clone(all)}
	c.Select(parse(t, "limit=4&after=fe80::0"))
	if n := len(c.Conns); n != 6 || c.Next != "" {
		t.Errorf("%d connections, next %q; want the other 6 and no more", n, c.Next)
	}
}

func TestBadPage(t *testing.T) {
	for _, query := range []string{"peer=host", "limit=0", "limit=-1", "limit=10001", "limit=x"} {
		q, _ := url.ParseQuery(query)
		if p, err := ParsePage(q.Get); err == nil || p != (Page{}) {
			t.Errorf("%s: %+v, %v; want an error and nothing", query, p, err)
		}
	}
}

// FuzzPage: whatever is asked for, a page has at most as many as it may, all of the list.
func FuzzPage(f *testing.F) {
	f.Add("limit=2&after=10.0.0.1&peer=fe80::1")
	f.Fuzz(func(t *testing.T, query string) {
		q, err := url.ParseQuery(query)
		if err != nil {
			return
		}
		p, err := ParsePage(q.Get)
		if err != nil {
			return
		}
		n := Neighbours{Neighbours: []Neighbour{{IP: "10.0.0.3", LinkAddr: "80 000123 fe80::1"}, {IP: "10.0.0.1"},
			{IP: "10.0.0.2"}}}
		n.Select(p)
		if p.Limit > 0 && len(n.Neighbours) > p.Limit {
			t.Errorf("%d elements, want %d at most", len(n.Neighbours), p.Limit)
		}
		for _, e := range n.Neighbours {
			if e.IP <= p.After && p.After != "" {
				t.Errorf("%s is not behind %q", e.IP, p.After)
			}
		}
	})
}
