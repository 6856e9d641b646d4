package main

import (
	"net/netip"
	"strings"
	"testing"

	"ipoibcm/control"
	"ipoibcm/internal/expect"
	"ipoibcm/internal/lab"
)

// Every peer has an address of its own within the farm's part of the subnet, where
// the agents' are not.
func TestFarmIP(t *testing.T) {
	m := &mesh{meshKind: meshKind{traffic: family4}}
	subnet := netip.MustParsePrefix(m.inner(0))
	seen := map[netip.Addr]bool{addr(m.inner(0)): true, addr(m.inner(1)): true}
	for i := range manyPeers {
		a := farmIP(i)
		if seen[a] || !subnet.Contains(a) {
			t.Fatalf("peer %d has %v: seen %v", i, a, seen[a])
		}
		seen[a] = true
		if got, ok := farmIndex(a); !ok || got != i {
			t.Fatalf("%v is of peer %d, %v, want %d", a, got, ok, i)
		}
	}
	for _, s := range []string{"10.99.0.1", "10.99.0.2", "10.98.1.1", "10.99.1.0", "10.99.1.251", "fd99::1"} {
		if i, ok := farmIndex(netip.MustParseAddr(s)); ok {
			t.Errorf("%s is of peer %d", s, i)
		}
	}
}

// What a farm prints reaches the crowd; lines that are something else, or of
// peers that it has not, do not.
func TestCrowdListens(t *testing.T) {
	c := &crowd{up: make([]int64, 2), news: make(chan news, 2)}
	c.listen(strings.NewReader("up 1 77\nnonsense\nup 2 78\nup -1 79\nup 0 80\n"))
	close(c.news)
	var got []news
	for n := range c.news {
		got = append(got, n)
	}
	expect.MustEqual(t, len(got), 2, "length of got")
	expect.Equal(t, got[0], news{1, 77}, "got[0]")
	expect.Equal(t, got[1], news{0, 80}, "got[1]")
}

func TestConnected(t *testing.T) {
	for _, tt := range []struct {
		conns []control.Conn
		want  bool
	}{
		{nil, false},
		{[]control.Conn{{Mode: oursUC, State: lab.Established}}, false},
		{[]control.Conn{{Mode: oursRC, State: "REQ_SENT"}}, false},
		{[]control.Conn{{Mode: oursUC, State: lab.Established}, {Mode: oursRC, State: lab.Established}}, true},
	} {
		if got := connected(oursRC)(tt.conns); got != tt.want {
			t.Errorf("%+v: %v, want %v", tt.conns, got, tt.want)
		}
	}
}
