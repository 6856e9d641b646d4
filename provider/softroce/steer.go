package softroce

import (
	"fmt"
	"time"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// If there are several data threads, each has a receiving socket, and the sockets share one
// address (SO_REUSEPORT). The QPN decides to which thread a queue pair belongs. A program
// of classic BPF, which needs no privilege, has the kernel put a packet into the socket
// of that thread. UD packets go to the first thread. So QP 1, multicast and the filters of
// datagrams are the first thread's too.
//
// The first socket is bound without SO_REUSEPORT, so that two agents on one port still
// refuse each other. It gets the option afterwards, before the other sockets are bound.

var _ verbs.Threader = (*Device)(nil)

// Threads implements [verbs.Threader].
func (d *Device) Threads() int { return len(d.threads) }

// Thread implements [verbs.Threader].
func (d *Device) Thread(i int) verbs.Provider { return view{d, d.threads[i]} }

// Steering implements [verbs.Threader].
func (d *Device) Steering() verbs.Offload {
	o := verbs.Offload{Name: "steering", What: "packets to the thread of their queue pair (SO_ATTACH_REUSEPORT_CBPF)"}
	switch {
	case d.whyFewer != "":
		o.Why = d.whyFewer
	case len(d.threads) == 1:
		o.Why = verbs.OneThread
	default:
		why := d.whyUnsteered.Load()
		if o.On = why == nil; !o.On {
			o.Why = *why
		}
	}
	return o
}

// A view is a Device as one of its threads has it: the completion queues that are made, and the
// file descriptors that are polled, belong to that thread.
type view struct {
	*Device
	th *thread
}

// CreateCQ implements [verbs.Provider].
func (v view) CreateCQ(depth int) (verbs.CQ, error) { return v.th.createCQ(depth) }

// PollFD implements [verbs.FDPoller].
func (v view) PollFD(fd int, step func() (more bool, wait time.Duration)) (stop func(), err error) {
	return v.th.pollFD(fd, step)
}

// A qpnClass is the QPNs of one data thread. Divided by the number of threads, each leaves
// the index of the thread.
type qpnClass struct{ index, threads ib.QPN }

// of returns the QPN of the class that stands for n: n rounded down to a multiple of
// threads, plus index, within the 24 bits of a QPN.
func (c qpnClass) of(n ib.QPN) ib.QPN {
	if c.threads <= 1 {
		return n
	}
	if n = n - n%c.threads + c.index; n > ib.QPNMask {
		n -= c.threads
	}
	return n
}

// steer returns the class of QPNs for q. A UD queue pair may have any: the kernel
// steers datagrams by the opcode.
func (d *Device) steer(q *qp) qpnClass {
	if q.transport == ib.UD {
		return qpnClass{}
	}
	return qpnClass{ib.QPN(q.th.index), ib.QPN(len(d.threads))}
}

// openSiblings opens the sockets of the other threads, with the family and the address of the
// receiver that was opened last. It does so for the default GID's family only. If a socket
// cannot be opened, the device has fewer threads.
func (d *Device) openSiblings(v6 bool) {
	if len(d.threads) == 1 || v6 == d.firstGID.Is4() {
		return
	}
	first := d.receivers[len(d.receivers)-1]
	err := d.admit(v6)
	for i := 1; i < len(d.threads); i++ {
		if err == nil {
			err = d.openReceiver(d.threads[i], v6, first.addr, false, first.share)
		}
		if err != nil {
			d.log.Warn("fewer data threads than asked for", "threads", i, "asked", len(d.threads), "error", err)
			d.whyFewer = fmt.Sprintf("%d of %d threads: %v", i, len(d.threads), err)
			for _, th := range d.threads[i:] {
				th.close()
			}
			d.threads = d.threads[:i]
			break
		}
	}
	d.steerSockets()
}

// admit sets SO_REUSEPORT on the first thread's socket, so that the sockets of the other threads
// can be bound to its port.
func (d *Device) admit(v6 bool) error {
	for _, r := range d.receivers {
		if r == d.threads[0].eventLoop() && r.v6 == v6 {
			return setAll(r.fd, []sockopt{reusePort})
		}
	}
	return nil
}

// steerSockets has the kernel choose among the sockets of the threads by QPN.
func (d *Device) steerSockets() {
	if len(d.threads) == 1 {
		return
	}
	r, program := d.threads[0].eventLoop(), assemble(steering(len(d.threads)))
	d.whyUnsteered.Store(nil)
	err := unix.SetsockoptSockFprog(r.fd, unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_CBPF, program)
	if err != nil {
		d.log.Warn("packets come to any data thread", "error", err)
		why := "SO_ATTACH_REUSEPORT_CBPF: " + err.Error()
		d.whyUnsteered.Store(&why)
	}
}

// assemble returns a program of our own for the kernel.
func assemble(p []bpf.Instruction) *unix.SockFprog {
	raw, err := bpf.Assemble(p)
	if err != nil {
		panic("softroce: " + err.Error()) // of our own making
	}
	filter := make([]unix.SockFilter, len(raw))
	for i, in := range raw {
		filter[i] = unix.SockFilter{Code: in.Op, Jt: in.Jt, Jf: in.Jf, K: in.K}
	}
	return &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
}

// steering returns the program. It sees the UDP payload and returns the number of a
// socket. Sockets are numbered in the order in which they joined the group.
func steering(threads int) []bpf.Instruction {
	return []bpf.Instruction{
		bpf.LoadAbsolute{Off: 0, Size: 1}, bpf.ALUOpConstant{Op: bpf.ALUOpShiftRight, Val: 5},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(transportUD), SkipFalse: 1}, bpf.RetConstant{Val: 0},
		bpf.LoadAbsolute{Off: 4, Size: 4}, bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: uint32(ib.QPNMask)},
		bpf.ALUOpConstant{Op: bpf.ALUOpMod, Val: uint32(threads)}, bpf.RetA{},
	}
}
