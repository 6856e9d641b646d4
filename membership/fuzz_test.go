package membership

import (
	"reflect"
	"testing"
	"time"
)

// What a record says can be written, and says the same again.
func FuzzRecord(f *testing.F) {
	f.Add([]byte(`{"v":1,"gids":["fe80::1"],"ips":["10.0.0.1"],"qpn":"0x000048"}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		m, err := ParseRecord("a", "k", in)
		if err != nil {
			return
		}
		out, err := AppendRecord(nil, m)
		if err != nil {
			t.Fatalf("%q was read and cannot be written: %v", in, err)
		}
		again, err := ParseRecord("a", "k", out)
		if err != nil {
			t.Fatalf("%q was written and cannot be read: %v", out, err)
		}
		if !m.Equal(&again) {
			t.Fatalf("%+v, then %+v", m, again)
		}
	})
}

// A list is an error or members that can be used.
func FuzzList(f *testing.F) {
	f.Add([]byte("a fe80::1 ip=10.0.0.1 qpn=0x48 # first\n192.0.2.1\n"))
	f.Fuzz(func(t *testing.T, in []byte) {
		ms, err := ParseList("f", in)
		if err != nil {
			return
		}
		for _, m := range ms {
			if err := m.check(); err != nil {
				t.Fatalf("%+v: %v", m, err)
			}
		}
		tr := NewTracker(Options{})
		tr.Step(start, Listed{Members: ms})
		if got := len(tr.Snapshot().Members); got != len(ms) {
			t.Fatalf("%d members, want %d", got, len(ms))
		}
	})
}

// What is read of the disk can be written.
func FuzzSaved(f *testing.F) {
	b, err := AppendSaved(nil, "blue", 3, Snapshot{Members: list("a b")})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, in []byte) {
		s, generation, err := ParseSaved("blue", in)
		if err != nil {
			return
		}
		out, err := AppendSaved(nil, "blue", generation, s)
		if err != nil {
			t.Fatal(err)
		}
		again, _, err := ParseSaved("blue", out)
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(s.Members, again.Members) {
			t.Fatalf("%+v, then %+v", s, again)
		}
	})
}

// Whatever a source tells, and whenever: the list is sorted and bounded, no failure shrinks
// it, and nobody who is named is missing.
func FuzzTracker(f *testing.F) {
	f.Add([]byte{0, 7, 2, 0, 0, 3, 3, 9, 1, 0, 0, 4})
	f.Fuzz(func(t *testing.T, in []byte) {
		tr := NewTracker(Options{Grace: 3 * time.Second})
		now := start
		names := []string{"a", "b", "c", "d"}
		for i := 0; i+1 < len(in); i += 2 {
			var ev Event
			named := ""
			switch in[i] % 5 {
			case 0:
				var l Listed
				for j, n := range names {
					switch {
					case in[i+1]>>j&1 != 0:
						l.Members = append(l.Members, list(n)...)
						named += n
					case in[i+1]>>(4+j)&1 != 0:
						l.Bad = append(l.Bad, Bad{n, errTest})
					}
				}
				ev = l
			case 1:
				ev = Current{}
			case 2:
				ev = Failed{errTest}
			case 3:
				now = now.Add(time.Duration(in[i+1]) * 100 * time.Millisecond)
			case 4:
				ev = Published{}
			}
			before := tr.Snapshot()
			changed := false
			if ev == nil {
				changed = tr.Expire(now)
			} else {
				changed = tr.Step(now, ev)
			}
			after := tr.Snapshot()
			if !changed && ids(before) != ids(after) {
				t.Fatalf("%T: from %q to %q, and that was not said", ev, ids(before), ids(after))
			}
			// Neither a failure nor a list of nobody takes anybody away at once.
			_, failed := ev.(Failed)
			emptied := ev != nil && len(named) == 0 && len(after.Members) == 0
			if failed || emptied {
				if len(after.Members) < len(before.Members) {
					t.Fatalf("%T: from %q to %q, want nobody to go", ev, ids(before), ids(after))
				}
			}
			for _, n := range named {
				if find(after.Members, string(n)) == nil {
					t.Fatalf("%c is named, and not in %q", n, ids(after))
				}
			}
		}
	})
}
