package softroce

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"ipoibcm/verbs"
)

var _ verbs.Successor = (*Device)(nil)

// A handover is the state of a device that takes sockets over from the previous process, and
// leaves its own to the next.
type handover struct {
	adopted bool // sockets were taken over: nothing is read before Begin
	begin   sync.Once
	reading sync.WaitGroup // the receivers' goroutines
	frozen  atomic.Bool
}

// Begin implements [verbs.Successor].
func (d *Device) Begin() {
	d.begin.Do(func() {
		for _, r := range d.receivers {
			d.reading.Add(1)
			d.wg.Go(func() {
				defer d.reading.Done()
				r.th.run(r)
			})
		}
	})
}

// Freeze implements [verbs.Successor].
func (d *Device) Freeze() (fds []int, err error) {
	if d.closing.Load() || d.frozen.Swap(true) {
		return nil, verbs.ErrClosed
	}
	for _, r := range d.receivers {
		r.wake()
	}
	d.reading.Wait()
	for _, r := range d.receivers {
		if r.th.index > 0 { // what comes is for connections, which end with this process
			continue
		}
		fd, e := unix.FcntlInt(uintptr(r.fd), unix.F_DUPFD_CLOEXEC, 0)
		if e != nil {
			err = errors.Join(err, fmt.Errorf("duplicate a socket: %w", e))
			continue
		}
		fds = append(fds, fd)
	}
	return fds, err
}

// adopt returns a socket of Options.Sockets that suits r, -1 if there is none. It trusts none of
// them: each is checked as if another program had made it.
func (d *Device) adopt(r *receiver) int {
	for i, fd := range d.opts.Sockets {
		if fd < 0 {
			continue
		}
		if err := r.suits(fd); err != nil {
			d.log.Debug("a socket does not suit", "fd", fd, "error", err)
		} else if r.prepare(fd) == nil {
			d.opts.Sockets[i] = -1
			d.adopted = true
			return fd
		}
	}
	return -1
}

// dropSockets closes those of Options.Sockets that no receiver took.
func (d *Device) dropSockets() {
	for i, fd := range d.opts.Sockets {
		if fd >= 0 {
			unix.Close(fd)
			d.opts.Sockets[i] = -1
		}
	}
}

// suits returns an error if the inherited socket fd differs from the one that r would open.
func (r *receiver) suits(fd int) error {
	opts := &r.dev.opts
	for _, o := range []struct {
		name, want int
		what       string
	}{
		{unix.SO_DOMAIN, map[bool]int{true: unix.AF_INET6, false: unix.AF_INET}[r.v6], "family"},
		{unix.SO_TYPE, unix.SOCK_DGRAM, "type"},
		{unix.SO_PROTOCOL, unix.IPPROTO_UDP, "protocol"},
	} {
		got, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, o.name)
		if err != nil {
			return fmt.Errorf("%s: %w", o.what, err)
		}
		if got != o.want {
			return fmt.Errorf("%s %d, want %d", o.what, got, o.want)
		}
	}
	if dev, err := unix.GetsockoptString(fd, unix.SOL_SOCKET, unix.SO_BINDTODEVICE); err != nil || dev != opts.Underlay {
		return fmt.Errorf("bound to device %q, %w", dev, err)
	}
	at, err := unix.Getsockname(fd)
	if err != nil {
		return err
	}
	var addr netip.Addr
	port := 0
	switch at := at.(type) {
	case *unix.SockaddrInet6:
		addr, port = netip.AddrFrom16(at.Addr), at.Port
	case *unix.SockaddrInet4:
		addr, port = netip.AddrFrom4(at.Addr), at.Port
	}
	if addr.IsUnspecified() {
		addr = netip.Addr{}
	}
	if addr != r.addr || port != int(opts.udpPort()) {
		return fmt.Errorf("bound to %v port %d", addr, port)
	}
	return r.deviceOf(fd)
}

// deviceOf returns an error if fd is bound to another device than the underlay, such
// as one that had its name before. If the kernel cannot report the device, it returns nil.
func (r *receiver) deviceOf(fd int) error {
	const optBindToIfindex = 62 // SO_BINDTOIFINDEX; Linux 5.0
	index, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, optBindToIfindex)
	if err == nil && index != int(r.dev.ifindex.Load()) {
		return fmt.Errorf("bound to device %d, which is not the underlay", index)
	}
	return nil
}
