package tun

import (
	"cmp"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
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
}

func (o *Options) mtu() int { return cmp.Or(o.MTU, DefaultMTU) }

// A File is a TUN device of the kernel.
//
// Reads go through the runtime's poller, so a blocked Read holds no thread and
// Close ends it. A locked thread in poll(2) on the device and an eventfd wakes
// sooner (BenchmarkWake, two busy cores: 25 against 45 microseconds); under load
// neither sleeps. A millisecond of poll(2) before the poller gained nothing.
type File struct {
	name  string
	index int
	f     *os.File
	rc    syscall.RawConn
	shut  atomic.Bool // after Close the poller's errors are its own

	// The reader's state. The callback is made once: a closure per Read would
	// be an allocation per batch.
	readMu sync.Mutex
	bufs   [][]byte
	sizes  []int
	n      int
	err    error
	readFn func(fd uintptr) bool

	writers sync.Pool // *writer
}

// A writer is one call of Write under way.
type writer struct {
	bufs [][]byte
	n    int
	err  error
	fn   func(fd uintptr) bool
}

var _ Device = (*File)(nil)

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
	t, err := setup(fd, o)
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	return t, nil
}

func setup(fd int, o Options) (*File, error) {
	ifr, err := unix.NewIfreq(o.Name)
	if err != nil {
		return nil, fmt.Errorf("open TUN %q: name too long", o.Name)
	}
	ifr.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr); err != nil {
		return nil, fmt.Errorf("create TUN %q: %w", o.Name, err)
	}
	t := &File{name: ifr.Name()}

	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open socket: %w", err)
	}
	defer unix.Close(s)
	req, err := unix.NewIfreq(t.name)
	if err != nil {
		return nil, fmt.Errorf("name %q: %w", t.name, err)
	}
	if err := unix.IoctlIfreq(s, unix.SIOCGIFINDEX, req); err != nil {
		return nil, fmt.Errorf("index of %s: %w", t.name, err)
	}
	t.index = int(req.Uint32())
	req.SetUint32(uint32(o.mtu()))
	if err := unix.IoctlIfreq(s, unix.SIOCSIFMTU, req); err != nil {
		return nil, fmt.Errorf("set MTU of %s to %d: %w", t.name, o.mtu(), err)
	}

	// Only now may the poller see the descriptor: before TUNSETIFF it polls as
	// an error.
	t.f = os.NewFile(uintptr(fd), "/dev/net/tun")
	if t.rc, err = t.f.SyscallConn(); err != nil {
		return nil, fmt.Errorf("poll %s: %w", t.name, err)
	}
	t.readFn = t.readReady
	t.writers.New = func() any {
		w := new(writer)
		w.fn = w.ready
		return w
	}
	return t, nil
}

// Name implements [Device].
func (t *File) Name() string { return t.name }

// Index implements [Device].
func (t *File) Index() int { return t.index }

// Close implements [Device].
func (t *File) Close() error {
	t.shut.Store(true)
	return t.f.Close()
}

// Read implements [Device].
func (t *File) Read(bufs [][]byte, sizes []int) (int, error) {
	if len(bufs) == 0 {
		return 0, nil
	}
	_ = sizes[len(bufs)-1]
	t.readMu.Lock()
	defer t.readMu.Unlock()
	t.bufs, t.sizes, t.n, t.err = bufs, sizes, 0, nil
	err := t.rc.Read(t.readFn)
	t.bufs, t.sizes = nil, nil
	if t.n > 0 {
		return t.n, nil // what ended the batch will be met again
	}
	return 0, t.closedError(cmp.Or(t.err, err))
}

// readReady takes all it can; false means that the poller should wait.
func (t *File) readReady(fd uintptr) bool {
	for t.n < len(t.bufs) {
		n, err := readFD(fd, t.bufs[t.n])
		switch err {
		case 0:
			if n > 0 {
				t.sizes[t.n] = n
				t.n++
			}
		case unix.EINTR:
		case unix.EAGAIN:
			return t.n > 0
		default:
			t.err = err
			return true
		}
	}
	return true
}

// Write implements [Device].
func (t *File) Write(bufs [][]byte) (int, error) {
	w := t.writers.Get().(*writer)
	w.bufs, w.n, w.err = bufs, 0, nil
	err := t.rc.Write(w.fn)
	n, werr := w.n, w.err
	w.bufs = nil
	t.writers.Put(w)
	return n, t.closedError(cmp.Or(werr, err))
}

func (w *writer) ready(fd uintptr) bool {
	for len(w.bufs) > 0 {
		err := writeFD(fd, w.bufs[0])
		switch err {
		case 0:
			w.n++
		case unix.EINTR:
			continue
		case unix.EAGAIN:
			return false
		default:
			w.err = err
		}
		w.bufs = w.bufs[1:]
	}
	return true
}

// closedError makes one error of the several that a closed device gives.
func (t *File) closedError(err error) error {
	if err != nil && t.shut.Load() {
		return os.ErrClosed
	}
	return err
}

// The system calls return an Errno, not an error: making an interface of one
// allocates for numbers the runtime has not prepared.

func readFD(fd uintptr, b []byte) (int, unix.Errno) {
	if len(b) == 0 {
		return 0, unix.EINVAL
	}
	n, _, e := unix.Syscall(unix.SYS_READ, fd, uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
	return int(n), e
}

func writeFD(fd uintptr, b []byte) unix.Errno {
	if len(b) == 0 {
		return unix.EINVAL
	}
	_, _, e := unix.Syscall(unix.SYS_WRITE, fd, uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
	return e
}
