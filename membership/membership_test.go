package membership

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"ipoibcm/ib"
)

var start = time.Unix(1000, 0)

func gid(s string) ib.GID {
	g, err := ib.ParseGID(s)
	if err != nil {
		panic(err)
	}
	return g
}

// list makes members of names; a name with digits behind a slash has that QPN.
func list(ids string) (out []Member) {
	for _, id := range strings.Fields(ids) {
		id, qpn, _ := strings.Cut(id, "/")
		m := Member{ID: id, GIDs: []ib.GID{gid(fmt.Sprintf("fe80::%x", []byte(id)[:1]))}, By: "test"}
		fmt.Sscan(qpn, &m.QPN)
		out = append(out, m)
	}
	return out
}

func ids(s Snapshot) string {
	var out []string
	for _, m := range s.Members {
		out = append(out, m.ID)
	}
	return strings.Join(out, " ")
}

// A run of a Tracker: at so many seconds this event, and then this list.
type step struct {
	at   float64
	ev   Event // nil: Expire
	want string
}

func play(t *testing.T, tr *Tracker, steps []step) {
	t.Helper()
	for i, s := range steps {
		now := start.Add(time.Duration(s.at * float64(time.Second)))
		before := ids(tr.Snapshot())
		changed := false
		if s.ev == nil {
			changed = tr.Expire(now)
		} else {
			changed = tr.Step(now, s.ev)
		}
		got := ids(tr.Snapshot())
		if got != s.want {
			t.Errorf("step %d: the list is %q, want %q", i, got, s.want)
		}
		if !changed && got != before {
			t.Errorf("step %d: the list changed from %q to %q, and that was not said", i, before, got)
		}
	}
}

var errTest = errors.New("no answer")

// A source that fails, that answers nothing, or one of whose records cannot be read shrinks
// no list.
func TestFailuresShrinkNothing(t *testing.T) {
	for _, tt := range []struct {
		name string
		ev   Event
	}{
		{"a failure", Failed{errTest}},
		{"an empty answer", Listed{}},
		{"nobody who can be used", Listed{Members: []Member{{ID: "a"}, {ID: "b"}}}},
		{"a record that cannot be read", Listed{Members: list("a c"), Bad: []Bad{{"b", errTest}}}},
		{"nothing but such records", Listed{Bad: []Bad{{"a", errTest}, {"b", errTest}, {"c", errTest}}}},
		{"the same list", Listed{Members: list("c b a")}},
		{"still right", Current{}},
	} {
		tr := NewTracker(Options{Source: "test"})
		play(t, tr, []step{{0, Listed{Members: list("a b c")}, "a b c"}, {1, tt.ev, "a b c"}})
		if t.Failed() {
			t.Fatalf("%s: see above", tt.name)
		}
	}
}

// The name of a record is anybody's octets: none of them reaches a terminal.
func TestNamesAreQuoted(t *testing.T) {
	tr := NewTracker(Options{Source: "test"})
	tr.Step(time.Unix(0, 0), Listed{Members: list("a"), Bad: []Bad{{"\x1b]0;x\a", errTest}}})
	if got, want := tr.Snapshot().Err.Error(), `"\x1b]0;x\a": no answer`; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// Who is missing right after a failure is kept for the grace, and who is missing later goes at
// once. Nobody's time runs while the source fails.
func TestGraceAfterFailure(t *testing.T) {
	tr := NewTracker(Options{Source: "test", Grace: 5 * time.Second})
	play(t, tr, []step{
		{0, Listed{Members: list("a b c")}, "a b c"},
		{1, Listed{Members: list("a b")}, "a b"}, // c said goodbye
		{2, Failed{errTest}, "a b"},
		{60, Listed{Members: list("a")}, "a b"},
		{62, nil, "a b"},
		{63, Failed{errTest}, "a b"},
		{90, nil, "a b"},
		{100, Current{}, "a b"},
		{104, nil, "a b"},
		{105, nil, "a"},
		{106, Listed{Members: list("a b")}, "a b"},
		{107, Listed{Members: list("b")}, "b"},
	})
	s := tr.Snapshot()
	if !s.Failing.IsZero() {
		t.Errorf("failing since %v, want not", s.Failing)
	}
	if tr.Failures() != 2 {
		t.Errorf("%d failures, want 2", tr.Failures())
	}
}

// Who is on the first list after a failure, and goes while the source works, is gone at
// once: his lease has ended since.
func TestGraceIsForTheFirstList(t *testing.T) {
	tr := NewTracker(Options{Grace: 5 * time.Second})
	play(t, tr, []step{
		{0, Listed{Members: list("a b c")}, "a b c"},
		{1, Failed{errTest}, "a b c"},
		{2, Current{}, "a b c"},
		{3, Listed{Members: list("a b")}, "a b c"},
		{4, Listed{Members: list("a")}, "a c"},
		{7, nil, "a"},
	})
}

// Who is held and comes back has never been away.
func TestHeldComesBack(t *testing.T) {
	tr := NewTracker(Options{Grace: 5 * time.Second})
	play(t, tr, []step{{0, Listed{Members: list("a b")}, "a b"}, {1, Failed{errTest}, "a b"},
		{2, Listed{Members: list("a")}, "a b"}})
	if got := tr.Snapshot().Held; !slices.Equal(got, []string{"b"}) {
		t.Errorf("held are %v, want b", got)
	}
	play(t, tr, []step{{3, Listed{Members: list("a b/7")}, "a b"}})
	s := tr.Snapshot()
	if len(s.Held) != 0 {
		t.Errorf("held are %v, want nobody", s.Held)
	}
	if s.Members[1].QPN != 7 {
		t.Errorf("QPN %v, want that of the new record", s.Members[1].QPN)
	}
	play(t, tr, []step{{20, nil, "a b"}})
}

// A list of before the start counts until the source answers, and its age is told.
func TestRestored(t *testing.T) {
	tr := NewTracker(Options{Source: "test", Grace: time.Second})
	tr.Restore(Snapshot{Members: list("b a"), At: start.Add(-time.Hour)})
	play(t, tr, []step{{0, Failed{errTest}, "a b"}, {1, Current{}, "a b"}})
	s := tr.Snapshot()
	if !s.Saved {
		t.Error("the list counts as confirmed, want as saved")
	}
	if got := start.Sub(s.At); got != time.Hour {
		t.Errorf("the list is %v old, want an hour", got)
	}
	play(t, tr, []step{{2, Listed{Members: list("a c")}, "a b c"}, {3, nil, "a c"}})
	if tr.Snapshot().Saved {
		t.Error("the list counts as saved, want as confirmed")
	}
}

// What cannot be a member is counted and told, and hides nobody else.
func TestUselessMembers(t *testing.T) {
	tr := NewTracker(Options{})
	bad := list("x")
	bad[0].GIDs = nil
	play(t, tr, []step{{0, Listed{Members: append(list("a"), bad...)}, "a"}})
	if tr.Refused() != 1 {
		t.Errorf("%d refused, want 1", tr.Refused())
	}
	if got := fmt.Sprint(tr.Snapshot().Err); got != "x has no GID" {
		t.Errorf("the error is %q, want that of x", got)
	}
}

// A list that is too long is cut at the same place on every host, and that is told.
func TestTooManyMembers(t *testing.T) {
	tr := NewTracker(Options{})
	var l Listed
	for i := range MaxMembers + 2 {
		l.Members = append(l.Members, Member{ID: fmt.Sprintf("%05d", MaxMembers+1-i), GIDs: []ib.GID{gid("fe80::1")}})
	}
	tr.Step(start, l)
	s := tr.Snapshot()
	if len(s.Members) != MaxMembers {
		t.Errorf("%d members, want %d", len(s.Members), MaxMembers)
	}
	if s.Members[0].ID != "00000" {
		t.Errorf("the first is %s, want 00000", s.Members[0].ID)
	}
	if tr.Refused() != 2 {
		t.Errorf("%d refused, want 2", tr.Refused())
	}
	if s.Err == nil {
		t.Error("no error, want that the list is too long")
	}
}

// GIDs leaves out ourselves and who is not allowed; Hints is the first claim by name, and
// Claims all.
func TestSnapshotOfHints(t *testing.T) {
	ip := netip.MustParseAddr("10.0.0.1")
	s := Snapshot{Members: []Member{
		{ID: "a", GIDs: []ib.GID{gid("fe80::a"), gid("fe80::1a")}, IPs: []netip.Addr{ip}},
		{ID: "b", GIDs: []ib.GID{gid("fe80::b")}, IPs: []netip.Addr{ip, netip.MustParseAddr("10.0.0.2")}},
		{ID: "c", GIDs: []ib.GID{gid("fe80::c"), gid("fe80::a")}},
	}}
	got := s.GIDs(gid("fe80::b"), func(g ib.GID) bool { return g != gid("fe80::c") })
	if want := []ib.GID{gid("fe80::a"), gid("fe80::1a")}; !slices.Equal(got, want) {
		t.Errorf("GIDs %v, want %v", got, want)
	}
	h := s.Hints()
	if h[ip] != gid("fe80::a") {
		t.Errorf("%v is said to be at %v, want fe80::a", ip, h[ip])
	}
	if len(h) != 2 {
		t.Errorf("%d hints, want 2", len(h))
	}
	if c := s.Claims(ip); len(c) != 2 {
		t.Errorf("%d claims, want 2", len(c))
	}
}

func TestParseList(t *testing.T) {
	for _, tt := range []struct{ in, want string }{
		{"", "[]"},
		{"# nobody\n\n", "[]"},
		{"fe80::1\n192.0.2.7 # seven\n", "[{fe80::1 [fe80::1] [] 0x000000 f:1} {192.0.2.7 [::ffff:192.0.2.7] [] " +
			"0x000000 f:2}]"},
		{"a fe80::1 192.0.2.1 ip=10.0.0.1 ip=fd00::1 qpn=0x48",
			"[{a [fe80::1 ::ffff:192.0.2.1] [10.0.0.1 fd00::1] 0x000048 f:1}]"},
		{"a", `line 1: "a": want a GID, or a name and GIDs`},
		{"a ip=10.0.0.1", "line 1: a has no GID"},
		{"\na fe80::1\na fe80::2", "line 3: a is on line 2 already"},
		{"a fe80::1 qpn=16777216", `line 1: qpn "16777216": want a number of 24 bits`},
		{"a fe80::1 x=1", `line 1: "x=1": want ip= or qpn=`},
		{"a ff02::1", "line 1: a has the GID ff02::1, which no host can have"},
		{"a fe80::1 ip=ff02::1", "line 1: a publishes the address ff02::1, which no host can have"},
		{"a/b fe80::1", `line 1: name "a/b": want 1 to 253 of letters, digits and . : _ -`},
	} {
		ms, err := ParseList("f", []byte(tt.in))
		got := fmt.Sprint(ms)
		if err != nil {
			got = err.Error()
		}
		if got != tt.want {
			t.Errorf("%q: got %s, want %s", tt.in, got, tt.want)
		}
	}
}

func TestParseRecord(t *testing.T) {
	for _, tt := range []struct{ in, want string }{
		{`{"v":1,"gids":["fe80::1"],"ips":["10.0.0.1"],"qpn":"0x000048"}`, "{a [fe80::1] [10.0.0.1] 0x000048 k}"},
		{`{"v":1,"gids":["192.0.2.1"],"later":{}}`, "{a [::ffff:192.0.2.1] [] 0x000000 k}"},
		{`{"v":2,"gids":["fe80::1"]}`, "version 2 of the record is not known here, only 1"},
		{`{"v":1}`, "a has no GID"},
		{`{"v":1,"gids":["fe80::1"]} {}`, "more than one record"},
		{`{"v":1,"gids":["fe80::1"],"ips":["::ffff:1.2.3.4"]}`,
			"a publishes the address ::ffff:1.2.3.4, which no host can have"},
		{`{"v":1,"gids":["1::1","1::2","1::3","1::4","1::5"]}`, "a has 5 GIDs, at most 4 can be"},
		{strings.Repeat(" ", maxRecordLen+1), "a record of 8193 octets, at most 8192 can be"},
	} {
		m, err := ParseRecord("a", "k", []byte(tt.in))
		got := fmt.Sprint(m)
		if err != nil {
			got = err.Error()
		}
		if got != tt.want {
			t.Errorf("%.60q: got %s, want %s", tt.in, got, tt.want)
		}
	}
}

// What is saved is read again for the same link, and neither a part of it nor that of
// another link.
func TestSaved(t *testing.T) {
	in := Snapshot{Source: "etcd://x", Revision: 9, At: start.UTC(), Members: list("a b/7")}
	b, err := AppendSaved(nil, "blue", 3, in)
	if err != nil {
		t.Fatal(err)
	}
	got, generation, err := ParseSaved("blue", append(b, "rest of a longer list"...))
	if err != nil {
		t.Fatal(err)
	}
	if generation != 3 {
		t.Errorf("generation %d, want 3", generation)
	}
	if ids(got) != "a b" || got.Members[1].QPN != 7 {
		t.Errorf("read %+v, want what was written", got.Members)
	}
	if !got.At.Equal(in.At) {
		t.Errorf("of %v, want %v", got.At, in.At)
	}
	if _, _, err := ParseSaved("red", b); err == nil {
		t.Error("the list of another link was taken")
	}
	for n := range len(b) {
		if _, _, err := ParseSaved("blue", b[:n]); err == nil {
			t.Fatalf("%d octets of %d were taken for a list", n, len(b))
		}
	}
	for i := range b {
		b[i] ^= 1
		if _, g, err := ParseSaved("blue", b); err == nil {
			t.Fatalf("octet %d is wrong and the list was taken, generation %d", i, g)
		}
		b[i] ^= 1
	}
}
