package ibverbs

import (
	"encoding/binary"
	"errors"
	"log/slog"
	"os"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/serviceid"
	"ipoibcm/verbs"
	"ipoibcm/wire/mad"
)

// A qp1 is QP 1 of a port with two interfaces, in partitions 0xffff and 0x8001.
type qp1 struct {
	t            *testing.T
	file, kernel *os.File
	users        [2]*gsiUser
	ended        [2]bool
}

func newQP1(t *testing.T) *qp1 {
	t.Helper()
	q := &qp1{t: t}
	q.file, q.kernel = umadPair(t)
	keys := []ib.PKey{0xffff, 0x8001}
	opened := 0
	open := func(gids func() gidTable, pkeys func() []ib.PKey) (*madPort, error) {
		opened++
		return newMADPort(q.file, 7, true, gids, pkeys, [4]uint64{}, slog.New(slog.DiscardHandler)), nil
	}
	for i := range q.users {
		var err error
		q.users[i], err = shareMADs(t.Name(), open, cmView{
			gids:        func() gidTable { return gidTable{{gid: gid("fe80::1"), index: 0}} },
			pkeys:       func() []ib.PKey { return keys },
			serves:      func(q ib.QPN) bool { return q == ib.QPN(0x100+i) },
			inPartition: func(k ib.PKey) bool { return (k^keys[i])&^ib.PKeyFull == 0 },
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if opened != 1 {
		t.Fatalf("QP 1 was opened %d times, want once", opened)
	}
	return q
}

// receive has a message come in, in the partition of an interface, and expects it at one.
func (q *qp1) receive(name string, in int, m mad.Message, want int) {
	q.t.Helper()
	b := make([]byte, umadHeaderLen+verbs.MADLen)
	(&umadHeader{agent: 7, qpn: 1, lid: 9, grh: true, gid: gid("fe80::9"), pkeyIdx: uint16(in)}).put(b)
	m.AppendBinary(b[umadHeaderLen:umadHeaderLen]) // the error is always nil
	if _, err := q.kernel.Write(b); err != nil {
		q.t.Fatal(err)
	}
	other := q.users[1-want].MADs()
	if q.ended[1-want] {
		other = nil
	}
	select {
	case <-q.users[want].MADs():
	case <-other:
		q.t.Errorf("%s: went to interface %d, want %d", name, 1-want, want)
	case <-time.After(10 * time.Second):
		q.t.Fatalf("%s: went to nobody", name)
	}
}

// send has an interface send a message.
func (q *qp1) send(u int, m mad.Message) {
	q.t.Helper()
	out := &verbs.MAD{Remote: gid("fe80::9"), QPN: 1, Path: verbs.Path{DLID: 9, GRH: true}}
	m.AppendBinary(out.Data[:0]) // the error is always nil
	if err := q.users[u].SendMAD(out); err != nil {
		q.t.Fatal(err)
	}
	q.kernel.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := q.kernel.Read(make([]byte, 1000)); err != nil {
		q.t.Fatal(err)
	}
}

// TestSharedQP1: two interfaces of a process on one port have one QP 1. A REQ goes to the one whose
// UD QP it names, an answer to the one that asked, and the rest by partition.
func TestSharedQP1(t *testing.T) {
	q := newQP1(t)
	for i := range 2 {
		for _, form := range []serviceid.Form{serviceid.RFC, serviceid.Legacy} {
			req := mad.REQ{ServiceID: serviceid.New(form, ib.QPN(0x100+i)), LocalCommID: 5}
			q.receive("a REQ for its UD QP", 0, req, i)
		}
		q.receive("a REQ for no UD QP, in its partition", i, mad.REQ{ServiceID: serviceid.RDMAIP(7), LocalCommID: 5}, i)
		stray := mad.DREQ{LocalCommID: 5, RemoteCommID: 0x999}
		q.receive("a DREQ for what nobody has, in its partition", i, stray, i)
		comm := mad.CommID(0x1000 + i)
		q.send(i, mad.REQ{ServiceID: serviceid.New(serviceid.RFC, 0x300), LocalCommID: comm})
		for _, m := range []mad.Message{mad.REP{LocalCommID: 6, RemoteCommID: comm}, mad.REJ{RemoteCommID: comm},
			mad.DREQ{LocalCommID: 6, RemoteCommID: comm}} {
			q.receive("an answer", 1-i, m, i)
		}
	}
	// One ends: the other has it all.
	q.users[0].close()
	q.users[0].close() // twice is harmless
	q.ended[0] = true
	if _, open := <-q.users[0].MADs(); open {
		t.Error("an interface that has ended hears something")
	}
	q.receive("what was for the one that has ended", 0, mad.DREQ{LocalCommID: 5, RemoteCommID: 0x1000}, 1)
	q.users[1].close()
	if shared.gsi[t.Name()] != nil {
		t.Error("QP 1 is still known after its last user")
	}
	if _, err := q.file.Write([]byte{0}); !errors.Is(err, os.ErrClosed) {
		t.Errorf("QP 1 after its last user: %v, want %v", err, os.ErrClosed)
	}
}

// TestSharedQP1WithGIDsOfTheirOwn: each interface has another GID of the port.
func TestSharedQP1WithGIDsOfTheirOwn(t *testing.T) {
	q := newQP1(t)
	defer q.users[0].close()
	defer q.users[1].close()
	own := [2]ib.GID{gid("fe80::1"), gid("fe80::2")}
	for i := range q.users {
		q.users[i].gids = func() gidTable { return gidTable{{gid: own[i], index: i, kind: gidIB}} }
	}
	buf := make([]byte, umadHeaderLen+verbs.MADLen)
	var h umadHeader
	for i, u := range q.users {
		out := &verbs.MAD{Local: own[i], Remote: gid("fe80::9"), QPN: 1, Path: verbs.Path{DLID: 9, GRH: true}}
		if err := u.SendMAD(out); err != nil {
			t.Fatal(err)
		}
		q.kernel.SetReadDeadline(time.Now().Add(10 * time.Second))
		if _, err := q.kernel.Read(buf); err != nil {
			t.Fatalf("interface %d sends nothing from its GID: %v", i, err)
		}
		if err := h.UnmarshalBinary(buf); err != nil || int(h.gidIdx) != i {
			t.Errorf("interface %d sends from the GID at %d (%v), want that at %[1]d", i, h.gidIdx, err)
		}
		// A REQ without a GRH: the header names no GID of ours.
		(&umadHeader{agent: 7, qpn: 1, lid: 9}).put(buf)
		req := mad.REQ{ServiceID: serviceid.New(serviceid.RFC, ib.QPN(0x100+i)), LocalCommID: 5}
		req.AppendBinary(buf[umadHeaderLen:umadHeaderLen]) // the error is always nil
		if _, err := q.kernel.Write(buf); err != nil {
			t.Fatal(err)
		}
		select {
		case m := <-u.MADs():
			if m.Local != own[i] || m.Path.SGID != own[i] {
				t.Errorf("interface %d has a REQ for %v by a path from %v, want its own %v", i, m.Local, m.Path.SGID, own[i])
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("interface %d has no REQ", i)
		}
	}
}

// TestCommIDsAreBounded: the oldest communication IDs are forgotten.
func TestCommIDsAreBounded(t *testing.T) {
	g := &gsi{owners: map[uint32]*gsiUser{}}
	u := &gsiUser{gsi: g}
	for i := range uint32(maxCommIDs + 10) {
		var m verbs.MAD
		binary.BigEndian.PutUint16(m.Data[attrAt:], uint16(mad.AttrREQ))
		binary.BigEndian.PutUint32(m.Data[firstCommID:], i+1)
		g.learn(u, &m)
	}
	if n := len(g.owners); n != maxCommIDs {
		t.Errorf("%d known, want %d", n, maxCommIDs)
	}
	if g.owners[10] != nil {
		t.Error("the oldest is known")
	}
	if g.owners[maxCommIDs+10] == nil {
		t.Error("the newest is not known")
	}
}
