package tun

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// iffExcl is IFF_TUN_EXCL. Without it, IFF_MULTI_QUEUE makes the kernel give a queue of an
// interface that exists already.
const iffExcl = 0x8000

// Queue opens a further queue of a TUN that was opened with [Options.Queues]. The caller must be
// in the network namespace of the interface, and call it before packets move. Closing t closes the
// queue too.
//
// The kernel chooses the queue of a packet (drivers/net/tun.c, tun_automq_select_queue). It takes
// the queue to which a packet of the same flow, in either direction, was written last within three
// seconds. Else it chooses by the hash of the flow.
func (t *File) Queue() (*File, error) {
	q := &File{name: t.name, index: t.index, parent: t}
	q.csum.on, q.csum.why = t.csum.on, t.csum.why
	q.follow(t)
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open /dev/net/tun: %w", err)
	}
	q.fd = fd
	if err := q.join(); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("open a queue of %s: %w", t.name, err)
	}
	t.queues = append(t.queues, q)
	return q, nil
}

// LeaveQueues detaches all queues but the first, so that all packets come to the first queue from
// now on, for the next process that has t. Packets that wait in a detached queue are lost, so the
// caller must read these queues before. Detached queues stay readable and writable.
func (t *File) LeaveQueues() error {
	for _, q := range t.queues {
		if _, err := request(q.fd, unix.TUNSETQUEUE, q.name, unix.IFF_DETACH_QUEUE); err != nil {
			return fmt.Errorf("leave a queue of %s: %w", t.name, err)
		}
	}
	return nil
}

// join attaches q to the interface of its parent, and to no other.
func (q *File) join() error {
	own, err := request(q.parent.fd, unix.TUNGETIFF, q.name, 0)
	if err != nil {
		return err
	}
	const matter = unix.IFF_TUN | unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR | unix.IFF_MULTI_QUEUE
	flags := own.Uint16() & matter
	if flags&unix.IFF_MULTI_QUEUE == 0 {
		return errors.New("it has one queue")
	}
	if err := q.isHere(); err != nil { // else the kernel would make one
		return err
	}
	if _, err := request(q.fd, unix.TUNSETIFF, q.name, flags); err != nil {
		return err
	}
	if err := q.isHere(); err != nil {
		return err
	}
	q.ended, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	return err
}

// isHere returns an error unless the interface of that name, in the namespace of this thread, has
// our index.
func (q *File) isHere() error {
	return q.withIfreq(func(s int, req *unix.Ifreq) error {
		if err := unix.IoctlIfreq(s, unix.SIOCGIFINDEX, req); err != nil {
			return fmt.Errorf("index: %w", err)
		}
		if got := int(req.Uint32()); got != q.index {
			return fmt.Errorf("its index is %d here, and not %d: it is another", got, q.index)
		}
		return nil
	})
}

// follow makes q use GSO packets exactly where t does.
func (q *File) follow(t *File) {
	q.tso.on.Store(t.tso.on.Load())
	q.uso.on.Store(t.uso.on.Load())
}
