package tun

import (
	"encoding/binary"
	"errors"
	"net"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ipoibcm/internal/expect"
)

// within polls until ok.
func within(t *testing.T, what string, ok func() bool) {
	t.Helper()
	expect.Eventually(t, what, ok)
}

// nextDatagram reads the next UDP datagram to port 9 that came to one of the queues, and says which.
func nextDatagram(t *testing.T, queues []*File) (pkt []byte, queue int) {
	t.Helper()
	buf, sizes := make([]byte, 1<<16), make([]int, 1)
	within(t, "a datagram", func() bool {
		for i, q := range queues {
			n, err := q.TryRead([][]byte{buf}, sizes)
			if err != nil {
				t.Fatal(err)
			}
			if n == 1 && buf[0]>>4 == 4 && buf[9] == protoUDP && binary.BigEndian.Uint16(buf[22:]) == 9 {
				pkt, queue = buf[:sizes[0]], i
				return true
			}
		}
		return false
	})
	return pkt, queue
}

// answer turns a datagram round.
func answer(pkt []byte) []byte {
	b := append([]byte(nil), pkt...)
	copy(b[12:16], pkt[16:20])
	copy(b[16:20], pkt[12:16])
	copy(b[20:22], pkt[22:24])
	copy(b[22:24], pkt[20:22])
	return b // sums stay what they were
}

// Packets of a flow come to the queue that its packets the other way were written to.
func TestQueues(t *testing.T) {
	f := open(t, Options{Name: "ibcm7", Queues: true})
	queues := []*File{f}
	for range 2 {
		q, err := f.Queue()
		if err != nil {
			t.Fatal(err)
		}
		if q.Name() != f.Name() {
			t.Errorf("name %s, want %s", q.Name(), f.Name())
		}
		if q.Index() != f.Index() {
			t.Errorf("index %d, want %d", q.Index(), f.Index())
		}
		queues = append(queues, q)
	}
	c := dial(t)
	for want := range queues {
		if _, err := c.Write(make([]byte, 700)); err != nil {
			t.Fatal(err)
		}
		pkt, _ := nextDatagram(t, queues)
		if n, err := queues[want].Write([][]byte{answer(pkt)}); n != 1 {
			t.Fatalf("queue %d: wrote %d: %v", want, n, err)
		}
		if _, err := c.Read(make([]byte, 1000)); err != nil {
			t.Fatal(err)
		}
		for range 3 {
			if _, err := c.Write([]byte("again")); err != nil {
				t.Fatal(err)
			}
			if _, got := nextDatagram(t, queues); got != want {
				t.Errorf("the next came to queue %d, want %d", got, want)
			}
		}
	}
	if f.Checksums().On {
		if got := f.Checksums().Completed; got != 12 {
			t.Errorf("%d checksums completed by all queues, want 12", got)
		}
	}
	f.SetGSO(false, false)
	for i, q := range queues {
		if q.Segments().On {
			t.Errorf("queue %d: TCP in GSO packets is on", i)
		}
	}
}

// After LeaveQueues the next packets come to the first queue, also those of a flow that belonged to
// another, and wait there; the others can still be written to.
func TestLeaveQueues(t *testing.T) {
	f := open(t, Options{Name: "ibcm7", Queues: true})
	q, err := f.Queue()
	if err != nil {
		t.Fatal(err)
	}
	c := dial(t)
	for _, step := range []struct {
		leave bool
		want  int
	}{{false, 1}, {true, 0}} {
		if _, err := c.Write([]byte("there")); err != nil {
			t.Fatal(err)
		}
		pkt, _ := nextDatagram(t, []*File{f, q})
		if n, err := q.Write([][]byte{answer(pkt)}); n != 1 {
			t.Fatalf("wrote %d: %v", n, err)
		}
		if _, err := c.Read(make([]byte, 100)); err != nil {
			t.Fatal(err)
		}
		if step.leave {
			if err := f.LeaveQueues(); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := c.Write([]byte("again")); err != nil {
			t.Fatal(err)
		}
		if _, got := nextDatagram(t, []*File{f, q}); got != step.want {
			t.Errorf("left %v: it came to queue %d, want %d", step.leave, got, step.want)
		}
	}
}

// An interface that is there already is not shared, and a queue is of its own interface only.
func TestQueueOfAnother(t *testing.T) {
	one := open(t, Options{Name: "ibcm7"})
	if _, err := one.Queue(); err == nil {
		t.Error("a further queue of a TUN that has one: no error")
	}
	many, err := Open(Options{Name: "ibcm8", Queues: true})
	if err != nil {
		t.Fatal(err)
	}
	defer many.Close()
	for _, queues := range []bool{true, false} {
		if f, err := Open(Options{Name: "ibcm8", Queues: queues}); err == nil {
			t.Errorf("a second TUN of that name, queues %v: no error", queues)
			f.Close()
		} else if queues && !errors.Is(err, unix.EBUSY) {
			t.Errorf("a second TUN of that name: %v, want EBUSY", err)
		}
	}
	l, err := netlink.LinkByName("ibcm8")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetName(l, "ibcm9"); err != nil {
		t.Fatal(err)
	}
	if q, err := many.Queue(); err == nil {
		t.Errorf("a queue of an interface that has another name now: %s", q.Name())
	}
	if _, err := netlink.LinkByName("ibcm8"); err == nil {
		t.Error("an interface was made")
	}
}

// The interface lasts as long as its first descriptor, and further queues are opened anew.
func TestAdoptQueues(t *testing.T) {
	f := open(t, Options{Name: "ibcm7", Queues: true})
	if _, err := f.Queue(); err != nil {
		t.Fatal(err)
	}
	held := keep(t, f)
	const want = "threads has changed"
	if _, err := Adopt(held, Options{Name: "ibcm7"}); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("taken over as a TUN with one queue: %v, want %q", err, want)
	}
	g, err := Adopt(held, Options{Name: "ibcm7", Queues: true})
	if err != nil {
		t.Fatal(err)
	}
	q, err := g.Queue()
	if err != nil {
		t.Fatal(err)
	}
	c := dial(t)
	if _, err := c.Write([]byte("one")); err != nil {
		t.Fatal(err)
	}
	pkt, _ := nextDatagram(t, []*File{g, q})
	if _, err := q.Write([][]byte{answer(pkt)}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write([]byte("two")); err != nil {
		t.Fatal(err)
	}
	if _, got := nextDatagram(t, []*File{g, q}); got != 1 {
		t.Errorf("it came to queue %d, want 1", got)
	}
	if err := g.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := q.TryRead([][]byte{make([]byte, 100)}, make([]int, 1)); err == nil {
		t.Error("a further queue is open though the TUN is closed")
	}
	if _, err := net.InterfaceByName("ibcm7"); err == nil {
		t.Error("the interface is there though nobody holds it")
	}
}
