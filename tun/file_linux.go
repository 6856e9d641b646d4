package tun

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Options says how to open a TUN. The zero value is ready to use.
type Options struct {
	// Name of the interface; a %d in it is replaced by a number that the kernel picks. Empty lets
	// the kernel pick the whole name ("tun0").
	Name string
	// MTU in octets, MinMTU to MaxMTU. Zero means DefaultMTU.
	MTU int
	// NoChecksum leaves the checksums of TCP and UDP to the kernel. They also stay with the kernel
	// if it cannot leave them to us. See [Checksums].
	NoChecksum bool
	// NoSegments makes the kernel split TCP into packets before it gives them out, and lets us
	// merge no packets for the kernel. NoChecksum has that effect too. See [Segments].
	NoSegments bool
	// NoDatagrams makes the kernel split UDP that a program gave it in one call (UDP_SEGMENT)
	// before it gives it out, and merges no datagrams for the kernel. NoChecksum has that effect
	// too. See [Datagrams].
	NoDatagrams bool
	// Queues says that there may be further queues ([File.Queue]). The name must then be
	// that of no interface yet.
	Queues bool
	// Proven is what [File.Proven] returned in an earlier process on the running kernel. If it
	// names the present version of the trial, no trial is made. Zero means that one is made.
	Proven int
	// trial replaces tryHeaders in tests, and in the TUN of the trial itself.
	trial func() (checksums, segments, datagrams error)
}

func (o *Options) mtu() int { return cmp.Or(o.MTU, DefaultMTU) }

// A File is a TUN device of the kernel.
//
// Its descriptor is not registered with the runtime's poller. A reader waits for packets in
// poll(2): File.Read on a thread of its own, or another goroutine together with other descriptors
// (FD, TryRead). The reader wakes sooner that way, and no other thread is woken.
type File struct {
	name  string
	index int
	fd    int
	ended int // eventfd that Close signals

	// use is held for reading while the descriptor is in use.
	use  sync.RWMutex
	shut atomic.Bool

	readMu  sync.Mutex
	readHdr [vnetLen]byte // under readMu

	parent *File   // of a further queue: the File of the first one
	queues []*File // the further queues

	hadHeaders bool // it had headers before packets when it was adopted
	proven     bool // the kernel has passed all of the trial
	csum       csums
	tso        tso
	uso        uso
}

var _ Pollable = (*File)(nil)

// Open creates the TUN interface and sets its MTU. The interface is down; it is
// gone when the File is closed or the process ends.
func Open(o Options) (*File, error) {
	if mtu := o.mtu(); mtu < MinMTU || mtu > MaxMTU {
		return nil, fmt.Errorf("open TUN: MTU %d is not in %d to %d", mtu, MinMTU, MaxMTU)
	}
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open /dev/net/tun: %w", err)
	}
	t := &File{fd: fd}
	if err := t.setup(o); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return t, nil
}

// Adopt takes over the TUN that fd is attached to, which an earlier process made. It must have the
// name o.Name, and must not be persistent. It must allow further queues exactly if o.Queues is set,
// and have headers before packets exactly if o and the kernel allow them. Its MTU stays. If Adopt
// returns no error, the File owns fd.
func Adopt(fd int, o Options) (*File, error) {
	t := &File{fd: fd}
	if err := t.takeOver(o); err != nil {
		return nil, fmt.Errorf("take TUN over: %w", err)
	}
	return t, nil
}

func (t *File) takeOver(o Options) error {
	ifr, err := request(t.fd, unix.TUNGETIFF, "", 0)
	if err != nil {
		return fmt.Errorf("it is no TUN with an interface: %w", err)
	}
	t.name = ifr.Name()
	if t.name != o.Name {
		return fmt.Errorf("it is interface %s, want %s", t.name, o.Name)
	}
	if err := unix.SetNonblock(t.fd, true); err != nil {
		return err
	}
	have := ifr.Uint16()
	t.hadHeaders = have&unix.IFF_VNET_HDR != 0
	want := t.flags(o)
	const matter = unix.IFF_TUN | unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR | unix.IFF_MULTI_QUEUE
	if have&matter != want {
		setting := "offload.checksum"
		if (have^want)&unix.IFF_MULTI_QUEUE != 0 {
			setting = "threads"
		}
		return fmt.Errorf("its flags are 0x%04x, want 0x%04x: %s has changed", have&matter, want, setting)
	}
	if have&unix.IFF_PERSIST != 0 {
		return errors.New("it would outlive its process")
	}
	return t.begin(0)
}

// flags finds out whether there may be headers before packets, and returns the flags of the TUN.
func (t *File) flags(o Options) uint16 {
	flags := uint16(unix.IFF_TUN | unix.IFF_NO_PI)
	t.csum.why, t.tso.why, t.uso.why = switchedOff, switchedOff, switchedOff
	if !o.NoChecksum {
		t.mayVnet(o)
	}
	if t.csum.on {
		flags |= unix.IFF_VNET_HDR
	}
	if o.Queues {
		flags |= unix.IFF_MULTI_QUEUE
	}
	if !t.csum.on {
		t.tso.cannot = "needs checksums by us: " + t.csum.why
		t.uso.cannot = t.tso.cannot
	}
	if !o.NoSegments {
		t.tso.set(true)
	}
	if !o.NoDatagrams {
		t.uso.set(true)
	}
	return flags
}

func (t *File) setup(o Options) error {
	if len(o.Name) >= unix.IFNAMSIZ {
		return fmt.Errorf("open TUN %q: name too long", o.Name)
	}
	flags := t.flags(o)
	if o.Queues {
		flags |= iffExcl
	}
	ifr, err := request(t.fd, unix.TUNSETIFF, o.Name, flags)
	if err != nil {
		return fmt.Errorf("create TUN %q: %w", o.Name, err)
	}
	t.name = ifr.Name()
	return t.begin(o.mtu())
}

// begin makes an attached TUN ready. It sets the MTU unless mtu is zero.
func (t *File) begin(mtu int) error {
	if t.csum.on {
		if err := t.vnet(); err != nil {
			return fmt.Errorf("%s: %w", t.name, err)
		}
	}
	err := t.withIfreq(func(s int, req *unix.Ifreq) error {
		if err := unix.IoctlIfreq(s, unix.SIOCGIFINDEX, req); err != nil {
			return fmt.Errorf("index of %s: %w", t.name, err)
		}
		t.index = int(req.Uint32())
		if mtu == 0 {
			return nil
		}
		req.SetUint32(uint32(mtu))
		if err := unix.IoctlIfreq(s, unix.SIOCSIFMTU, req); err != nil {
			return fmt.Errorf("set MTU of %s to %d: %w", t.name, mtu, err)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if t.ended, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return fmt.Errorf("create eventfd: %w", err)
	}
	return nil
}

// withIfreq calls f with a request that has the name of the interface, and a socket to make it of.
func (t *File) withIfreq(f func(s int, req *unix.Ifreq) error) error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open socket: %w", err)
	}
	defer unix.Close(s)
	req, err := unix.NewIfreq(t.name)
	if err != nil {
		return fmt.Errorf("name %q: %w", t.name, err)
	}
	return f(s, req)
}

// request makes a request of the TUN fd, and returns it with the kernel's answer in it.
func request(fd int, what uint, name string, flags uint16) (*unix.Ifreq, error) {
	ifr, err := unix.NewIfreq(name)
	if err != nil {
		return nil, err
	}
	ifr.SetUint16(flags)
	return ifr, unix.IoctlIfreq(fd, what, ifr)
}

// mayVnet finds out whether the kernel can put a header before packets, and handles that header as
// we expect.
func (t *File) mayVnet(o Options) {
	features, err := features(t.fd)
	switch {
	case err != nil:
		t.csum.why = "the kernel does not say what it can: " + err.Error()
		return
	case features&unix.IFF_VNET_HDR == 0:
		t.csum.why = "the kernel has no IFF_VNET_HDR"
		return
	}
	if t.proven = o.Proven == trialVersion; t.proven {
		t.csum.on, t.csum.why = true, ""
		return
	}
	trial := o.trial
	if trial == nil {
		trial = tryHeaders
	}
	sums, segments, datagrams := trial()
	t.proven = sums == nil && segments == nil && datagrams == nil
	if t.hadHeaders && slow(sums) {
		sums = nil // the process before tried it on this kernel, which can; the machine is only busy
	}
	if t.csum.on, t.csum.why = judge(sums); !t.csum.on {
		return
	}
	t.tso.judged(segments)
	t.uso.judged(datagrams)
}

// features returns the flags of TUNSETIFF that the kernel knows.
func features(fd int) (uint32, error) { return unix.IoctlGetUint32(fd, unix.TUNGETFEATURES) }

// Proven returns the version of the trial if the kernel has passed all of it, else zero. It is for
// the [Options] of the process that takes the TUN over. A trial takes tens of milliseconds, in
// which no packet passes.
func (t *File) Proven() int {
	if t.proven {
		return trialVersion
	}
	return 0
}

// judge returns whether something is on after a trial that ended with err, and why not or what is
// doubtful. If nothing could be tried, we trust the kernel.
func judge(err error) (on bool, why string) {
	switch {
	case errors.Is(err, errNotTried):
		return true, "not tried, because " + err.Error()
	case err != nil:
		return false, "its test failed: " + err.Error()
	}
	return true, ""
}

// vnet makes sure that the header before packets has the length vnetLen, and lets the kernel leave
// checksums to us. If the kernel refuses, it computes them itself as before.
func (t *File) vnet() error {
	n, err := unix.IoctlGetUint32(t.fd, unix.TUNGETVNETHDRSZ)
	if err == nil && n != vnetLen {
		err = unix.IoctlSetPointerInt(t.fd, unix.TUNSETVNETHDRSZ, vnetLen)
	}
	if err != nil {
		return fmt.Errorf("length of the header before packets: %w", err)
	}
	if t.offerGSO(); t.uso.on.Load() || t.tso.on.Load() {
		return nil
	}
	if e := t.offload(tunFCsum); e != 0 {
		t.csum.why = "the kernel keeps checksums to itself: " + e.Error()
	}
	return nil
}

// features returns what the kernel may leave to us, as flags of TUNSETOFFLOAD.
func (t *File) features() (f uintptr) {
	f = tunFCsum
	if t.tso.on.Load() {
		f |= tunFTSO4 | tunFTSO6
	}
	if t.uso.on.Load() {
		f |= tunFUSO4 | tunFUSO6
	}
	return f
}

// offload tells the kernel what it may leave to us.
func (t *File) offload(what uintptr) unix.Errno {
	_, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(t.fd), unix.TUNSETOFFLOAD, what)
	return e
}

// Name implements [Device].
func (t *File) Name() string { return t.name }

// Index implements [Device].
func (t *File) Index() int { return t.index }

// FD implements [Pollable].
func (t *File) FD() int { return t.fd }

// Close implements [Device].
func (t *File) Close() error {
	if t.shut.Swap(true) {
		return os.ErrClosed
	}
	for _, q := range t.queues {
		_ = q.Close() // it may be closed already
	}
	one := [8]byte{1}
	_, _ = unix.Write(t.ended, one[:])
	t.use.Lock() // nobody uses the descriptors any more
	defer t.use.Unlock()
	unix.Close(t.ended)
	return unix.Close(t.fd)
}

// Read implements [Device].
func (t *File) Read(bufs [][]byte, sizes []int) (int, error) {
	for {
		n, err := t.TryRead(bufs, sizes)
		if n > 0 || err != nil || len(bufs) == 0 {
			return n, err
		}
		if err := t.wait(); err != nil {
			return 0, err
		}
	}
}

// waitMax bounds each wait of Read, in milliseconds: ADR 0013 says what a longer one can do to the process.
const waitMax = 1000

// wait returns when there is something to read, when Close was called, or after waitMax.
func (t *File) wait() error {
	t.use.RLock()
	defer t.use.RUnlock()
	if t.shut.Load() {
		return os.ErrClosed
	}
	fds := [2]unix.PollFd{{Fd: int32(t.fd), Events: unix.POLLIN}, {Fd: int32(t.ended), Events: unix.POLLIN}}
	if _, err := unix.Poll(fds[:], waitMax); err != nil && err != unix.EINTR {
		return fmt.Errorf("poll %s: %w", t.name, err)
	}
	if fds[0].Revents&(unix.POLLERR|unix.POLLHUP) != 0 && fds[0].Revents&unix.POLLIN == 0 {
		return fmt.Errorf("poll %s: %w", t.name, unix.ENODEV) // it was deleted
	}
	return nil
}

// TryRead implements [Pollable].
func (t *File) TryRead(bufs [][]byte, sizes []int) (n int, err error) {
	if len(bufs) == 0 {
		return 0, nil
	}
	_ = sizes[len(bufs)-1]
	t.readMu.Lock()
	defer t.readMu.Unlock()
	t.use.RLock()
	defer t.use.RUnlock()
	if t.shut.Load() {
		return 0, os.ErrClosed
	}
	for n < len(bufs) {
		if t.tso.rest.more() {
			n += t.tso.resume(bufs[n:], sizes[n:])
			continue
		}
		k, e := t.read(bufs[n])
		switch {
		case e == 0 && k > 0 && t.csum.on && t.readHdr[1] != 0:
			made := t.tso.take(&t.readHdr, k, bufs[n:], sizes[n:])
			if t.readHdr[1] == vnetUDP && made > 0 {
				t.uso.split.Add(1)
			}
			n += made
		case e == 0 && k > 0:
			if t.csum.on && !t.csum.complete(&t.readHdr, bufs[n][:k]) {
				continue
			}
			sizes[n] = k
			n++
		case e == 0, e == unix.EINTR:
		case e == unix.EAGAIN, n > 0: // an error that ended the batch will come again
			return n, nil
		default:
			return 0, e
		}
	}
	return n, nil
}

// Write implements [Device].
func (t *File) Write(bufs [][]byte) (n int, err error) {
	t.use.RLock()
	defer t.use.RUnlock()
	if t.shut.Load() {
		return 0, os.ErrClosed
	}
	for len(bufs) > 0 {
		tried, e := t.write(bufs)
		if e == 0 {
			n += tried
		} else {
			err = e
		}
		bufs = bufs[tried:]
	}
	return n, err
}

// The functions for system calls return an Errno, not an error: converting an Errno to an error
// allocates for numbers that the runtime has not prepared. They do not tell the scheduler of the
// call: the descriptor does not block, and a packet takes microseconds.

func (t *File) read(b []byte) (int, unix.Errno) {
	if len(b) == 0 {
		return 0, unix.EINVAL
	}
	if !t.csum.on {
		n, _, e := unix.RawSyscall(unix.SYS_READ, uintptr(t.fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
		return int(n), e
	}
	var iov [2]unix.Iovec
	iov[0] = vec(t.readHdr[:])
	iov[1] = vec(b)
	n, _, e := unix.RawSyscall(unix.SYS_READV, uintptr(t.fd), uintptr(unsafe.Pointer(&iov)), uintptr(len(iov)))
	return int(n) - vnetLen, e
}

// write writes the first packet of bufs, or the first few as one GSO packet of TCP or UDP. It
// returns how many packets it tried to write.
func (t *File) write(bufs [][]byte) (tried int, e unix.Errno) {
	b := bufs[0]
	if len(b) == 0 {
		return 1, unix.EINVAL
	}
	var iov [2]unix.Iovec
	if !t.csum.on {
		iov[0] = vec(b)
		return 1, t.writev(iov[:1])
	}
	var h [vnetLen]byte
	s, right := t.csum.look(b)
	if t.uso.on.Load() && len(bufs) > 1 && !t.uso.noMerge.Load() && isUDP(b) {
		var m datagrams
		if m.begin(b, s, right) {
			for m.n < len(bufs) && m.add(bufs[m.n]) {
			}
			if m.n > 1 {
				return t.writeDatagrams(bufs[:m.n], &m)
			}
			s, right = m.seg, true
		}
	} else if right && t.tso.on.Load() && len(bufs) > 1 && !t.tso.noMerge.Load() {
		var m merger
		if m.begin(b, s) {
			for m.n < len(bufs) && m.add(bufs[m.n]) {
			}
			if m.n > 1 {
				return t.writeMerged(bufs[:m.n], &m)
			}
		}
	}
	if right {
		s.mark(&h, b)
	}
	iov[0] = vec(h[:])
	iov[1] = vec(b)
	return 1, t.writev(iov[:])
}

// writeMerged writes the TCP packets of m to the kernel as one GSO packet. tried is how many
// packets it tried to write.
func (t *File) writeMerged(bufs [][]byte, m *merger) (tried int, e unix.Errno) {
	var head [maxHead]byte
	copy(head[:], m.first[:m.seg.head])
	var h [vnetLen]byte
	m.finish(&h)
	n, e := t.writeGSO(bufs, &h, head[:m.seg.head], &t.tso.toggle)
	if n > 1 && e == 0 {
		t.csum.verified.Add(uint64(n - 1)) // the first is counted
	}
	return n, e
}

// writeDatagrams writes the datagrams of m to the kernel as one GSO packet. tried is how many
// datagrams it tried to write.
func (t *File) writeDatagrams(bufs [][]byte, m *datagrams) (tried int, e unix.Errno) {
	var head [maxHead]byte
	copy(head[:], m.first[:m.seg.head])
	var h [vnetLen]byte
	m.finish(&h)
	return t.writeGSO(bufs, &h, head[:m.seg.head], &t.uso.toggle)
}

// writeGSO writes bufs as one GSO packet with header h: the first packet, whose headers are those
// of the GSO packet, and the payload of the others. If the kernel does not take it, the first
// packet gets its own headers (head) back and is written alone, unless the interface is down or
// gone. If the kernel takes that packet, and refused the GSO packet as invalid or too long, writeGSO
// sets o.noMerge.
func (t *File) writeGSO(bufs [][]byte, h *[vnetLen]byte, head []byte, o *toggle) (tried int, e unix.Errno) {
	var iov [1 + maxMerged]unix.Iovec
	iov[0] = vec(h[:])
	iov[1] = vec(bufs[0])
	for i, b := range bufs[1:] {
		iov[2+i] = vec(b[len(head):])
	}
	switch e = t.writev(iov[:1+len(bufs)]); e {
	case 0:
		o.merged.Add(uint64(len(bufs)))
		o.written.Add(1)
		return len(bufs), 0
	case unix.EIO, unix.EBADFD:
		return len(bufs), e
	}
	bad := e == unix.EINVAL || e == unix.EMSGSIZE
	copy(bufs[0], head)
	*h = [vnetLen]byte{}
	iov[0] = vec(h[:])
	iov[1] = vec(bufs[0])
	if e = t.writev(iov[:2]); e == 0 && bad {
		o.noMerge.Store(true)
	}
	return 1, e
}

// vec returns an I/O vector of b, which is not empty.
func vec(b []byte) (v unix.Iovec) {
	v.Base = &b[0]
	v.SetLen(len(b))
	return v
}

func (t *File) writev(iov []unix.Iovec) unix.Errno {
	for {
		_, _, e := unix.RawSyscall(unix.SYS_WRITEV, uintptr(t.fd), uintptr(unsafe.Pointer(&iov[0])), uintptr(len(iov)))
		if e != unix.EINTR {
			return e
		}
	}
}
