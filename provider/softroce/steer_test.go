package softroce

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

// QPNs of a thread say so, and are numbers that a queue pair may have.
func TestQPNClass(t *testing.T) {
	for _, tt := range []struct {
		c       qpnClass
		n, want ib.QPN
	}{
		{qpnClass{}, 0x123457, 0x123457},
		{qpnClass{0, 1}, 0x123457, 0x123457},
		{qpnClass{1, 4}, 0x123456, 0x123455},
		{qpnClass{3, 4}, 0xffffff, 0xffffff},
		{qpnClass{2, 3}, 0xffffff, 0xfffffe}, // 0xffffff is 0 modulo 3
		{qpnClass{63, 64}, 0, 63},
	} {
		if got := tt.c.of(tt.n); got != tt.want {
			t.Errorf("%+v: QPN for %v is %v, want %v", tt.c, tt.n, got, tt.want)
		}
	}
}

// The program finds the thread of a packet.
func TestSteeringProgram(t *testing.T) {
	vm, err := bpf.NewVM(steering(3))
	must(t, err)
	for _, tt := range []struct {
		name   string
		op     roce.Opcode
		qpn    ib.QPN
		length int
		want   int
	}{
		{"RC", roce.RCSendOnly, 0x101, 16, 0x101 % 3},
		{"UC", roce.UCSendOnly, 0xffffff, 16, 0},
		{"an acknowledgement", roce.RCAck, 0x100, 20, 0x100 % 3},
		{"a datagram", roce.UDSendOnly, 0x101, 28, 0},
		{"a datagram to QP 1", roce.UDSendOnly, 1, 28, 0},
		{"too short", roce.RCSendOnly, 0x101, 7, 0},
		{"nothing", 0, 0, 0, 0},
	} {
		pkt := make([]byte, 64)
		roce.PutBTH(pkt, roce.BTHFields{Opcode: tt.op, DestQPN: tt.qpn, PKey: 0xffff, AckReq: true, PSN: 0x123456})
		pkt[4] = 0xff // reserved, FECN, BECN
		got, err := vm.Run(pkt[:tt.length])
		must(t, err)
		if got != tt.want {
			t.Errorf("%s: thread %d, want %d", tt.name, got, tt.want)
		}
	}
}

// Each thread receives what is for its queue pairs. Where the kernel does not steer them
// whoever has them delivers them, in order.
func TestThreads(t *testing.T) {
	for _, f := range families {
		for _, steered := range []bool{true, false} {
			for _, tr := range []ib.Transport{ib.RC, ib.UC} {
				t.Run(fmt.Sprintf("%s/steered %v/%v", f.name, steered, tr), func(t *testing.T) {
					threads(t, f, steered, tr)
				})
			}
		}
	}
}

func threads(t *testing.T, f family, steered bool, tr ib.Transport) {
	const n, count, size = 3, 20, 20000
	da, db := pair(t, f, func(o *Options) { o.Threads = n })
	if got := db.Threads(); got != n {
		t.Fatalf("%d threads, want %d: %+v", got, n, db.Steering())
	}
	if o := db.Steering(); !o.On {
		t.Fatalf("not steered: %s", o.Why)
	}
	if !steered {
		for _, d := range []*Device{da, db} {
			_ = unix.SetsockoptInt(d.threads[0].eventLoop().fd, unix.SOL_SOCKET, unix.SO_DETACH_REUSEPORT_BPF, 0)
		}
	}
	ud := newEnd(t, db, ib.UD, 8, 4096).datagram()
	_, err := ud.qp.PostRecv([]verbs.RecvWR{{SG: ud.sge(0, 4096)}})
	must(t, err)
	newEnd(t, da, ib.UD, 8, 4096).datagram().sendTo(db.Port().GIDs[0], ud.qp.QPN(), 100)
	if wc := ud.next(); wc.Status != verbs.Success {
		t.Fatalf("datagram: %+v", wc)
	}
	for i := range n {
		a, b := newEndOn(t, da, (i+1)%n, tr, 64, size), newEndOn(t, db, i, tr, 64, size)
		connect(a, b)
		if got := int(b.qp.QPN()) % n; got != i {
			t.Errorf("thread %d: QPN %v is of thread %d", i, b.qp.QPN(), got)
		}
		before := db.threads[i].count.rxPackets.Load()
		for k := range count {
			_, err := b.qp.PostRecv([]verbs.RecvWR{{ID: uint64(k), SG: b.sge(k, size)}})
			must(t, err)
		}
		for k := range count {
			_, err := a.qp.PostSend([]verbs.SendWR{{ID: uint64(k), Flags: verbs.Signaled, SG: a.sge(k, size)}})
			must(t, err)
			if wc := a.next(); wc.Status != verbs.Success {
				t.Fatalf("thread %d: send %d: %+v", i, k, wc)
			}
		}
		for k := range count {
			wc := b.next()
			expect.MustEqual(t, wc.Status, verbs.Success, "thread %d: Status of receive %d", i, k)
			expect.MustEqual(t, wc.ID, uint64(k), "thread %d: ID of receive %d", i, k)
		}
		if db.threads[i].count.rxPackets.Load() == before && steered {
			t.Errorf("thread %d received nothing", i)
		}
	}
	elsewhere := counter(da, "rx_other_thread") + counter(db, "rx_other_thread")
	if steered && elsewhere > 0 {
		t.Errorf("%d packets came to another thread than that of their queue pair", elsewhere)
	}
}

// Each thread looks after a descriptor, and calls the handlers of its own queues.
func TestPollFDOnEach(t *testing.T) {
	const n = 3
	a, _ := pair(t, families[0], func(o *Options) { o.Threads = n })
	var fds [n]*counterFD
	for i := range fds {
		fds[i] = newCounterFD(t)
		stop, err := a.Thread(i).(verbs.FDPoller).PollFD(fds[i].fd, fds[i].step)
		must(t, err)
		defer stop()
		if _, err := a.Thread(i).(verbs.FDPoller).PollFD(fds[i].fd, fds[i].step); !errors.Is(err, verbs.ErrQueueFull) {
			t.Errorf("thread %d: a second descriptor: %v", i, err)
		}
	}
	for i, c := range fds {
		c.add(uint64(i + 1))
		until(t, "a step of the thread", func() bool { return c.sum.Load() == uint64(i+1) })
	}
	must(t, a.Alive(patience))
	for i := range n { // of both devices; those of tests before may be about to end
		until(t, "two threads have its name", func() bool { return threadsNamed(threadName(i)) == 2 })
	}
}

// threadsNamed returns how many threads of the process have a name.
func threadsNamed(name string) (n int) {
	files, _ := filepath.Glob("/proc/self/task/*/comm")
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil && strings.TrimSpace(string(b)) == name {
			n++
		}
	}
	return n
}

// Two agents on one port still refuse each other, whatever their threads share.
func TestPortIsOurs(t *testing.T) {
	own(t)
	for _, first := range []int{1, 4} {
		for _, second := range []int{1, 4} {
			d, err := Open(Options{Underlay: "lo", PreferIPv4: true, Threads: first})
			must(t, err)
			other, err := Open(Options{Underlay: "lo", PreferIPv4: true, Threads: second})
			if !errors.Is(err, unix.EADDRINUSE) {
				t.Errorf("%d threads beside %d: %v, want EADDRINUSE", second, first, err)
				if err == nil {
					_ = other.Close()
				}
			}
			must(t, d.Close())
		}
	}
}
