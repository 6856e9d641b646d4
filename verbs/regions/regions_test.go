package regions

import (
	"crypto/rand"
	"testing"
	"unsafe"

	"ipoibcm/internal/expect"
	"ipoibcm/verbs"
)

func newTable() *Table {
	var t Table
	t.Init(func(b []byte) { _, _ = rand.Read(b) })
	return &t
}

func TestFind(t *testing.T) {
	tab := newTable()
	buf := Alloc(100)
	r, err := tab.Register(buf, verbs.RemoteWrite)
	if err != nil {
		t.Fatal(err)
	}
	other, err := tab.Register(Alloc(100), verbs.RemoteRead)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name   string
		key    uint32
		addr   uint64
		n      uint64
		access verbs.Access
		want   Refusal
	}{
		{"all", r.RKey, r.Addr, 100, verbs.RemoteWrite, Found},
		{"the last octet", r.RKey, r.Addr + 99, 1, verbs.RemoteWrite, Found},
		{"nothing, at the end", r.RKey, r.Addr + 100, 0, verbs.RemoteWrite, Found},
		{"no such key", r.RKey ^ other.RKey ^ 1, r.Addr, 1, verbs.RemoteWrite, NoRegion},
		{"not for reading", r.RKey, r.Addr, 1, verbs.RemoteRead, NoAccess},
		{"not for both", r.RKey, r.Addr, 1, verbs.RemoteRead | verbs.RemoteWrite, NoAccess},
		{"one too many", r.RKey, r.Addr, 101, verbs.RemoteWrite, Outside},
		{"one before", r.RKey, r.Addr - 1, 1, verbs.RemoteWrite, Outside},
		{"past the end", r.RKey, r.Addr + 101, 0, verbs.RemoteWrite, Outside},
		{"the neighbour's address", r.RKey, other.Addr, 1, verbs.RemoteWrite, Outside},
		{"wraps", r.RKey, ^uint64(0), 2, verbs.RemoteWrite, Wraps},
		{"more than there are addresses", r.RKey, r.Addr, ^uint64(0), verbs.RemoteWrite, Wraps},
		{"more than an int of 32 bits can count", r.RKey, r.Addr, 1 << 31, verbs.RemoteWrite, Outside},
	} {
		got, why := tab.Find(tt.key, tt.addr, tt.n, tt.access)
		expect.Equal(t, why, tt.want, "%s: what Find says", tt.name)
		if why != Found {
			if got != nil {
				t.Errorf("%s: %d octets beside %v, want none", tt.name, len(got), why)
			}
			continue
		}
		expect.Equal(t, uint64(len(got)), tt.n, "%s: length", tt.name)
		expect.Equal(t, uint64(cap(got)), tt.n, "%s: capacity", tt.name)
		if len(got) > 0 && &got[0] != &buf[tt.addr-r.Addr] {
			t.Errorf("%s: other octets than those from %d of the region", tt.name, tt.addr-r.Addr)
		}
	}
}

func TestEndOfRegion(t *testing.T) {
	tab := newTable()
	r, err := tab.Register(Alloc(1), verbs.RemoteWrite)
	if err != nil {
		t.Fatal(err)
	}
	private, err := tab.Register(Alloc(1), 0)
	if err != nil {
		t.Fatal(err)
	}
	if tab.Invalidate(private.RKey) {
		t.Error("a region that peers cannot use was invalidated")
	}
	if !tab.Invalidate(r.RKey) || tab.Invalidate(r.RKey) {
		t.Error("a region is invalidated once")
	}
	if _, why := tab.Find(r.RKey, r.Addr, 1, verbs.RemoteWrite); why != NoRegion {
		t.Errorf("invalidated: %v", why)
	}
	copied := *r
	if tab.Deregister(&copied) == nil || tab.Deregister(nil) == nil {
		t.Error("what was not registered was deregistered")
	}
	if err := tab.Deregister(r); err != nil {
		t.Error(err)
	}
	if tab.Deregister(r) == nil {
		t.Error("deregistered twice")
	}
}

func TestAlloc(t *testing.T) {
	for _, n := range []int{1, 4096, 70000} {
		if b := Alloc(n); len(b) != n || uintptr(unsafe.Pointer(&b[0]))%4096 != 0 {
			t.Errorf("%d octets at %p", len(b), &b[0])
		}
	}
}
