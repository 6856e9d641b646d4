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
	// Name of the interface; a %d in it is a number the kernel picks.
	// Empty lets the kernel pick all of it ("tun0").
	Name string
	// MTU in octets, MinMTU to MaxMTU. Zero means DefaultMTU.
	MTU int
	// NoChecksum leaves the checksums of TCP and UDP to the kernel, as it is where
	// the kernel does not give them away. See [Checksums].
	NoChecksum bool
	// trial replaces tryChecksums in tests, and in the trial itself.
	trial func() error
}

func (o *Options) mtu() int { return cmp.Or(o.MTU, DefaultMTU) }

// A File is a TUN device of the kernel.
//
// Its descriptor is not with the runtime's poller: whoever waits for packets does
// so in poll(2), File.Read on a thread of its own or somebody else together with
// other descriptors (FD, TryRead). That wakes sooner, and nobody else is woken.
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

	csum csums
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

func (t *File) setup(o Options) error {
	ifr, err := unix.NewIfreq(o.Name)
	if err != nil {
		return fmt.Errorf("open TUN %q: name too long", o.Name)
	}
	flags := uint16(unix.IFF_TUN | unix.IFF_NO_PI)
	if t.csum.why = "switched off"; !o.NoChecksum {
		trial := o.trial
		if trial == nil {
			trial = tryChecksums
		}
		t.csum.on, t.csum.why = t.mayVnet(trial)
	}
	if t.csum.on {
		flags |= unix.IFF_VNET_HDR
	}
	ifr.SetUint16(flags)
	if err := unix.IoctlIfreq(t.fd, unix.TUNSETIFF, ifr); err != nil {
		return fmt.Errorf("create TUN %q: %w", o.Name, err)
	}
	t.name = ifr.Name()
	if t.csum.on {
		if err := t.vnet(); err != nil {
			return fmt.Errorf("%s: %w", t.name, err)
		}
	}

	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open socket: %w", err)
	}
	defer unix.Close(s)
	req, err := unix.NewIfreq(t.name)
	if err != nil {
		return fmt.Errorf("name %q: %w", t.name, err)
	}
	if err := unix.IoctlIfreq(s, unix.SIOCGIFINDEX, req); err != nil {
		return fmt.Errorf("index of %s: %w", t.name, err)
	}
	t.index = int(req.Uint32())
	req.SetUint32(uint32(o.mtu()))
	if err := unix.IoctlIfreq(s, unix.SIOCSIFMTU, req); err != nil {
		return fmt.Errorf("set MTU of %s to %d: %w", t.name, o.mtu(), err)
	}

	if t.ended, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return fmt.Errorf("create eventfd: %w", err)
	}
	return nil
}

// mayVnet reports whether the kernel can put a header before packets, and does
// with it what we think. If not, or if that cannot be tried, why says so.
func (t *File) mayVnet(trial func() error) (ok bool, why string) {
	features, err := unix.IoctlGetInt(t.fd, unix.TUNGETFEATURES)
	switch {
	case err != nil:
		return false, "the kernel does not say what it can: " + err.Error()
	case features&unix.IFF_VNET_HDR == 0:
		return false, "the kernel has no IFF_VNET_HDR"
	}
	switch err := trial(); {
	case errors.Is(err, errNotTried):
		return true, "not tried, because " + err.Error()
	case err != nil:
		return false, "its test failed: " + err.Error()
	}
	return true, ""
}

// vnet sees that the header before packets is as long as we think, and lets the
// kernel leave checksums to us. If it does not want to, it computes them itself
// as before.
func (t *File) vnet() error {
	n, err := unix.IoctlGetInt(t.fd, unix.TUNGETVNETHDRSZ)
	if err == nil && n != vnetLen {
		err = unix.IoctlSetPointerInt(t.fd, unix.TUNSETVNETHDRSZ, vnetLen)
	}
	if err != nil {
		return fmt.Errorf("length of the header before packets: %w", err)
	}
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(t.fd), unix.TUNSETOFFLOAD, tunFCsum); e != 0 {
		t.csum.why = "the kernel keeps checksums to itself: " + e.Error()
	}
	return nil
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

// wait returns when there is something to read, or Close was called.
func (t *File) wait() error {
	t.use.RLock()
	defer t.use.RUnlock()
	if t.shut.Load() {
		return os.ErrClosed
	}
	fds := [2]unix.PollFd{{Fd: int32(t.fd), Events: unix.POLLIN}, {Fd: int32(t.ended), Events: unix.POLLIN}}
	if _, err := unix.Poll(fds[:], -1); err != nil && err != unix.EINTR {
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
		k, e := t.read(bufs[n])
		switch {
		case e == 0 && k > 0:
			if t.csum.on && !t.csum.complete(&t.readHdr, bufs[n][:k]) {
				continue
			}
			sizes[n] = k
			n++
		case e == 0, e == unix.EINTR:
		case e == unix.EAGAIN, n > 0: // what ended the batch will be met again
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
	for i := 0; i < len(bufs); i++ {
		switch e := t.write(bufs[i]); e {
		case 0:
			n++
		case unix.EINTR:
			i--
		default:
			err = e
		}
	}
	return n, err
}

// The system calls return an Errno, not an error: making an interface of one
// allocates for numbers the runtime has not prepared. They do not tell the
// scheduler: the descriptor does not block, and a packet takes microseconds.

func (t *File) read(b []byte) (int, unix.Errno) {
	if len(b) == 0 {
		return 0, unix.EINVAL
	}
	if !t.csum.on {
		n, _, e := unix.RawSyscall(unix.SYS_READ, uintptr(t.fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
		return int(n), e
	}
	iov := pair(&t.readHdr, b)
	n, _, e := unix.RawSyscall(unix.SYS_READV, uintptr(t.fd), uintptr(unsafe.Pointer(&iov)), uintptr(len(iov)))
	return int(n) - vnetLen, e
}

func (t *File) write(b []byte) unix.Errno {
	if len(b) == 0 {
		return unix.EINVAL
	}
	if !t.csum.on {
		_, _, e := unix.RawSyscall(unix.SYS_WRITE, uintptr(t.fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
		return e
	}
	var h [vnetLen]byte
	t.csum.header(&h, b)
	return t.writeHeaded(&h, b)
}

func (t *File) writeHeaded(h *[vnetLen]byte, b []byte) unix.Errno {
	iov := pair(h, b)
	_, _, e := unix.RawSyscall(unix.SYS_WRITEV, uintptr(t.fd), uintptr(unsafe.Pointer(&iov)), uintptr(len(iov)))
	return e
}

// pair is the iovec of a header and its packet.
func pair(h *[vnetLen]byte, b []byte) (iov [2]unix.Iovec) {
	iov[0].Base, iov[1].Base = &h[0], &b[0]
	iov[0].SetLen(vnetLen)
	iov[1].SetLen(len(b))
	return iov
}
