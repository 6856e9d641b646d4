package main

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/agent"
	"ipoibcm/ib"
	"ipoibcm/ipoib/handover"
	"ipoibcm/wire/encap"
)

// A manager is the end of a service manager that hears of its store.
type manager struct {
	t    *testing.T
	conn *net.UnixConn
}

// newManager makes this process one that such a manager has started.
func newManager(t *testing.T) *manager {
	path := filepath.Join(t.TempDir(), "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	t.Setenv("NOTIFY_SOCKET", path)
	t.Setenv("FDSTORE", "16")
	return &manager{t, conn}
}

// hears returns the next message, in one line, and how many descriptors came with it.
func (m *manager) hears() (text string, fds int) {
	m.t.Helper()
	if err := m.conn.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		m.t.Fatal(err)
	}
	b, oob := make([]byte, 4096), make([]byte, 4096)
	n, on, _, _, err := m.conn.ReadMsgUnix(b, oob)
	if err != nil {
		m.t.Fatal(err)
	}
	msgs, _ := unix.ParseSocketControlMessage(oob[:on])
	for _, msg := range msgs {
		rights, _ := unix.ParseUnixRights(&msg)
		fds += len(rights)
		for _, fd := range rights {
			unix.Close(fd)
		}
	}
	return strings.ReplaceAll(string(b[:n]), "\n", " "), fds
}

// stateFile is what an interface leaves to the next process.
func stateFile(t *testing.T, fdName, ifName string) *os.File {
	t.Helper()
	s := handover.State{Name: ifName, Link: encap.LinkAddr{QPN: 0x17, GID: ib.GID{15: 1}}, GUID: 5, PKey: ib.DefaultPKey,
		QKey: ib.QKeyIPoIB}
	b, err := s.AppendBinary(nil)
	if err != nil {
		t.Fatal(err)
	}
	return kept(t, fdName, b)
}

// kept is a descriptor as the manager gives it.
func kept(t *testing.T, name string, content []byte) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("kept", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), name)
	t.Cleanup(func() { f.Close() })
	if _, err := f.Write(content); err != nil {
		t.Fatal(err)
	}
	return f
}

// Each of several interfaces keeps its descriptors under names of its own; those of the only one of
// a process are as they always were.
func TestStoreNames(t *testing.T) {
	m := newManager(t)
	f := kept(t, "x", nil)
	for _, tt := range []struct{ owner, put, remove string }{
		{"", "FDSTORE=1 FDNAME=tun FDPOLL=0", "FDSTOREREMOVE=1 FDNAME=tun"},
		{ownerOf("ib0.8001"), "FDSTORE=1 FDNAME=tun@ib0.8001 FDPOLL=0", "FDSTOREREMOVE=1 FDNAME=tun@ib0.8001"},
	} {
		store := openStore(tt.owner)
		if err := store.Put(agent.StoreTUN, int(f.Fd())); err != nil {
			t.Fatal(err)
		}
		if text, fds := m.hears(); text != tt.put || fds != 1 {
			t.Errorf("%q: the manager hears %q with %d descriptors, want %q with 1", tt.owner, text, fds, tt.put)
		}
		if err := store.Remove(agent.StoreTUN); err != nil {
			t.Fatal(err)
		}
		if text, _ := m.hears(); text != tt.remove {
			t.Errorf("%q: the manager hears %q, want %q", tt.owner, text, tt.remove)
		}
	}
}

// What was left goes to the interface that left it; what is of none is let go of.
func TestHeirs(t *testing.T) {
	m := newManager(t)
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	files := []*os.File{kept(t, "tun@a", nil), stateFile(t, "state@a", "a"), kept(t, "tun@b", nil),
		stateFile(t, "state@b", "b"), kept(t, "tun@gone", nil), kept(t, "tun", nil)}
	all := heirs(files, []string{ownerOf("a"), ownerOf("b"), ownerOf("new")}, openStore, log)
	for _, want := range []string{"FDSTOREREMOVE=1 FDNAME=tun@gone", "FDSTOREREMOVE=1 FDNAME=tun"} {
		if text, _ := m.hears(); text != want {
			t.Errorf("the manager hears %q, want %q", text, want)
		}
	}
	for _, f := range files[4:] {
		if err := f.Close(); err == nil {
			t.Errorf("%s was left open", f.Name())
		}
	}
	for i, name := range []string{"a", "b"} {
		store := openStore(ownerOf(name))
		h := predecessorOf(all[ownerOf(name)], store, log)
		if h.TUN != files[2*i] {
			t.Errorf("%s has not got its TUN", name)
		}
		if h.State == nil || h.State.Name != name {
			t.Errorf("%s has not got its state, but %+v", name, h.State)
		}
		var heard []string
		for range 2 {
			text, _ := m.hears()
			heard = append(heard, text)
		}
		want := []string{"FDSTOREREMOVE=1 FDNAME=state@" + name, "FDSTOREREMOVE=1 FDNAME=sockets@" + name}
		if !slices.Equal(heard, want) {
			t.Errorf("%s: the manager hears %q, want %q", name, heard, want)
		}
	}
	if h := predecessorOf(all[ownerOf("new")], nil, log); h.TUN != nil || h.State != nil {
		t.Errorf("an interface that is new has got %s", fmt.Sprint(h))
	}
}

// A process with one interface takes what has no owner, and nothing of several.
func TestHeirsOfOne(t *testing.T) {
	m := newManager(t)
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	files := []*os.File{kept(t, "tun@a", nil), kept(t, "tun", nil)}
	all := heirs(files, []string{""}, openStore, log)
	if got := all[""]; len(got) != 1 || got[0] != files[1] {
		t.Errorf("it has got %v, want what is named tun", got)
	}
	if text, _ := m.hears(); text != "FDSTOREREMOVE=1 FDNAME=tun@a" {
		t.Errorf("the manager hears %q", text)
	}
}

// How members are found is a setting of each interface; provider ibverbs can use none, and whose setting
// it is that asks for one is said.
func TestMembershipOfInterfaces(t *testing.T) {
	for _, tt := range []struct{ text, want string }{
		{"provider: ibverbs\nunderlay: eth0\ninterfaces:\n- name: a\n- {name: b, membership: 'dns://x'}\n",
			"interfaces[1]: membership: provider ibverbs"},
		{"provider: ibverbs\nunderlay: eth0\nmembership: dns://x\ninterfaces:\n- name: a\n- name: b\n",
			"interfaces[0]: membership: provider ibverbs"},
	} {
		if _, err := severalOf([]byte(tt.text)); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%q: %v, want %q", tt.text, err, tt.want)
		}
	}
}
