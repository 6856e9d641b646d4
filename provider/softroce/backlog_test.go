package softroce

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/verbs"
)

// limit gives the underlay of d a rate in octets per second, with a long queue.
func limit(t *testing.T, d *Device, rate uint64) {
	t.Helper()
	q := &netlink.Tbf{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: int(d.ifindex.Load()), Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
		Rate: rate, Buffer: 20000, Limit: 64 << 20}
	if err := netlink.QdiscAdd(q); err != nil {
		t.Skipf("no tbf here: %v", err)
	}
}

// Who posts more than a slow device takes does not wait for it, and nothing of it
// is lost or overtaken: what has no room in the socket leaves later.
func TestFullSocketHoldsUpNobody(t *testing.T) {
	const most, tries = 100 * time.Millisecond, 5
	for _, v4 := range []bool{false, true} {
		t.Run(fmt.Sprintf("IPv4 %v", v4), func(t *testing.T) {
			// Who waits for the device waits each time, and who lets packets overtake others does; others may have
			// the processors now and then. Beside other work some message in some hundred tries is given up at its
			// second packet, and which packet was out of order is not known.
			took, overtaken := time.Hour, uint64(1)
			for i := 0; i < tries && (took > most || overtaken > 0); i++ {
				t.Run(fmt.Sprint("try ", i+1), func(t *testing.T) {
					d, o := fillSocket(t, v4)
					took, overtaken = min(took, d), min(overtaken, o)
				})
			}
			if took > most {
				t.Errorf("posting took %v at least, want %v at most", took, most)
			}
			if overtaken > 0 {
				t.Errorf("packets were overtaken in each of %d tries", tries)
			}
		})
	}
}

// fillSocket posts more than a slow device takes, checks what comes of it, and returns how long posting took, and
// how many packets came out of their order.
func fillSocket(t *testing.T, v4 bool) (took time.Duration, overtaken uint64) {
	a, b := vethPair(t, 9000, v4, func(o *Options) { o.SendBuffer = 64 << 10 })
	limit(t, a, 4<<20)
	const n, size, packets = 24, 60000, (60000 + 4095) / 4096
	x, y := newEnd(t, a, ib.UC, n, size), newEnd(t, b, ib.UC, n, size)
	connect(x, y)
	for i := range n {
		_, err := y.qp.PostRecv([]verbs.RecvWR{{ID: uint64(i), SG: y.sge(i, size)}})
		must(t, err)
	}
	begun := time.Now()
	for i := range n {
		s := x.sge(i, size)
		s[0].Buf[0], s[0].Buf[size-1] = byte(i), byte(i)
		_, err := x.qp.PostSend([]verbs.SendWR{{ID: uint64(i), Flags: verbs.Signaled, SG: s}})
		must(t, err)
	}
	took = time.Since(begun)
	if counter(a, "tx_waits") == 0 {
		t.Error("the socket was never full")
	}
	for i := range n {
		wc := x.next()
		expect.MustEqual(t, wc.ID, uint64(i), "ID of send %d", i)
		expect.MustEqual(t, wc.Status, verbs.Success, "Status of send %d", i)
	}
	waitForUC(t, b, n*packets)
	if overtaken = counter(b, "uc_drop_sequence"); overtaken > 0 {
		return took, overtaken
	}
	for i := range n {
		wc := y.next()
		expect.MustEqual(t, wc.ID, uint64(i), "ID of receive %d", i)
		expect.MustEqual(t, wc.ByteLen, size, "ByteLen of receive %d", i)
		got := y.sge(i, size)[0].Buf
		expect.Equal(t, got[0], byte(i), "first octet of message %d", i)
		expect.Equal(t, got[size-1], byte(i), "last octet of message %d", i)
	}
	return took, 0
}

// waitForUC waits until n packets of UC have come to d, those included that another has overtaken: the kernel may
// exchange two packets of a message, which is then given up.
func waitForUC(t *testing.T, d *Device, n int) {
	t.Helper()
	until(t, fmt.Sprintf("%d packets of UC", n), func() bool {
		return counter(d, "uc_packets_in")+counter(d, "uc_drop_sequence") >= uint64(n)
	})
}

// A kernel that refuses to report room in a socket is asked again: nothing is lost, and no queue pair waits for ever.
// Several rounds, because a receiver that happens to be awake looks for room without being woken, and one that is
// not woken looks after waitMax.
func TestFullSocketWithoutReport(t *testing.T) {
	a, b := vethPair(t, 9000, false, func(o *Options) { o.SendBuffer = 64 << 10 })
	limit(t, a, 4<<20)
	const most, size, packets = 64, 60000, (60000 + 4095) / 4096
	x, y := newEnd(t, a, ib.UC, most, size), newEnd(t, b, ib.UC, most, size)
	connect(x, y)
	for i := range most {
		_, err := y.qp.PostRecv([]verbs.RecvWR{{ID: uint64(i), SG: y.sge(i, size)}})
		must(t, err)
	}
	th := a.threads[0]
	reports := th.writable
	var took []time.Duration
	for next := 0; next < 6*4; {
		time.Sleep(5 * time.Millisecond) // the receiver sleeps
		begun := time.Now()
		setReports(a, -1)
		n := postUntilFull(t, x, size, most-next)
		setReports(a, reports)
		for i := range n {
			expect.MustEqual(t, x.next().ID, uint64(i), "ID of send %d", i)
		}
		next += n
		waitForUC(t, b, next*packets)
		took = append(took, time.Since(begun))
		expect.Equal(t, counter(a, "tx_drop_no_room"), uint64(0), "packets dropped")
		expect.Equal(t, th.full.Load(), true, "th.full while a send buffer is full")
		waitNotFull(t, th)
	}
	if slices.Sort(took); took[len(took)/2] > waitMax/2 {
		t.Errorf("each round took %v, want less than %v for half of them", took, waitMax/2)
	}
}

// postUntilFull posts messages of size octets on x until the socket has had no room for one, and two more. That
// takes more of them if others have the processor for so long that the device sends what was posted. It
// returns how many were posted; more than most are a failure. Their IDs begin at 0.
func postUntilFull(t *testing.T, x *end, size, most int) int {
	t.Helper()
	waits, full := counter(x.d, "tx_waits"), most
	for i := range most {
		_, err := x.qp.PostSend([]verbs.SendWR{{ID: uint64(i), Flags: verbs.Signaled, SG: x.sge(0, size)}})
		must(t, err)
		switch {
		case full == most && counter(x.d, "tx_waits") > waits:
			full = i
		case i >= full+2:
			return i + 1
		}
	}
	t.Fatalf("%d messages, and the socket was not full two before the last", most)
	return 0
}

// waitNotFull waits until the event loop of th, woken often, has found that no send buffer is full any more: it
// polls the epoll descriptor no more.
func waitNotFull(t *testing.T, th *thread) {
	t.Helper()
	for range 100 * pollsToRecheck {
		th.eventLoop().wake()
		if !th.full.Load() {
			return
		}
		time.Sleep(100 * time.Microsecond)
	}
	t.Fatal("th.full is still set although no send buffer is full")
}

// A receiver that always has something else to do looks for room in sockets all the same.
func TestFullSocketOfBusyReceiver(t *testing.T) {
	a, b := vethPair(t, 9000, false, func(o *Options) { o.SendBuffer = 64 << 10 })
	limit(t, a, 4<<20)
	const most, size = 64, 60000
	x, y := newEnd(t, a, ib.UC, most, size), newEnd(t, b, ib.UC, most, size)
	connect(x, y)
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	must(t, err)
	defer unix.Close(fd)
	stop, err := a.PollFD(fd, func() (bool, time.Duration) { return true, 0 })
	must(t, err)
	defer stop()
	for i := range postUntilFull(t, x, size, most) {
		expect.MustEqual(t, x.next().ID, uint64(i), "ID of send %d", i)
	}
}

// setReports has the senders of d use fd as the epoll descriptor that reports room.
func setReports(d *Device, fd int) {
	for _, s := range d.senders {
		s.mu.Lock()
		defer s.mu.Unlock()
	}
	d.threads[0].writable = fd
}

// Of datagrams a full socket keeps some and loses the rest, and says how many.
func TestFullSocketKeepsFewDatagrams(t *testing.T) {
	a, b := vethPair(t, 9000, false, func(o *Options) { o.SendBuffer = 64 << 10 })
	limit(t, a, 4<<20)
	const n, size = 512, 2000
	x, y := newEnd(t, a, ib.UD, n, size+verbs.GRHLen).datagram(), newEnd(t, b, ib.UD, n, size+verbs.GRHLen).datagram()
	for range n {
		_, err := y.qp.PostRecv([]verbs.RecvWR{{SG: y.sge(0, size+verbs.GRHLen)}})
		must(t, err)
	}
	h, err := a.CreateAH(verbs.AHAttr{DGID: b.Port().GIDs[0]})
	must(t, err)
	for range n {
		_, err = x.qp.PostSend([]verbs.SendWR{{SG: x.sge(0, size), AH: h, RemoteQPN: y.qp.QPN(), RemoteQKey: 0x1b}})
		must(t, err)
	}
	lost := counter(a, "tx_drop_no_room") // who waits for the device loses none
	if lost == 0 || lost > n-backlogOctets/(size+100) {
		t.Errorf("%d of %d were lost", lost, n)
	}
	for range n - int(lost) {
		y.next()
	}
	if got := counter(b, "ud_packets_in"); got != n-lost {
		t.Errorf("%d came, %d were lost of %d", got, lost, n)
	}
}

// A batch that the kernel refuses to one peer leaves packet by packet, and takes
// UDP_SEGMENT from nobody else; a while later it is tried again.
func TestRefusedBatch(t *testing.T) {
	for _, errno := range []unix.Errno{unix.EINVAL, unix.EMSGSIZE, unix.EIO} {
		a, b := vethPair(t, 9000, false, nil)
		const size = 60000
		one, two := newEnd(t, a, ib.UC, 4, size), newEnd(t, a, ib.UC, 4, size)
		at1, at2 := newEnd(t, b, ib.UC, 4, size), newEnd(t, b, ib.UC, 4, size)
		connect(one, at1)
		connect(two, at2)
		for _, s := range a.senders {
			s.fail = func(p *path, n int) unix.Errno {
				if p == one.qp.path && n > 1 {
					return errno
				}
				return 0
			}
		}
		send := func(from, to *end) (batches uint64) {
			before := counter(a, "tx_batches")
			_, err := to.qp.PostRecv([]verbs.RecvWR{{SG: to.sge(0, size)}})
			must(t, err)
			_, err = from.qp.PostSend([]verbs.SendWR{{SG: from.sge(0, size)}})
			must(t, err)
			if wc := to.next(); wc.ByteLen != size {
				t.Fatalf("%v: %+v", errno, wc)
			}
			return counter(a, "tx_batches") - before
		}
		if n := send(one, at1); n != 0 {
			t.Errorf("%v: %d batches passed", errno, n)
		}
		if n := send(two, at2); n == 0 {
			t.Errorf("%v: another peer got no batch", errno)
		}
		if n := counter(a, "tx_gso_refused"); n != 1 {
			t.Errorf("%v: %d batches were refused, want 1: the next are not tried for a while", errno, n)
		}
		for _, s := range a.senders {
			s.fail = nil
		}
		if left := time.Until(one.qp.path.batchAgain); left <= 0 || left > time.Minute {
			t.Errorf("%v: tried again in %v", errno, left)
		}
		one.qp.path.batchAgain = time.Now()
		if n := send(one, at1); n == 0 {
			t.Errorf("%v: no batch passed although the kernel takes them again", errno)
		}
		must(t, a.Close())
		must(t, b.Close())
		l, err := netlink.LinkByName("va")
		must(t, err)
		must(t, netlink.LinkDel(l))
	}
}
