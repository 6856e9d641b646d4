package agent

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/datapath"
	"ipoibcm/hostnet"
	"ipoibcm/ib"
	"ipoibcm/ipoib"
	"ipoibcm/ipoib/handover"
	"ipoibcm/mtu"
	"ipoibcm/tun"
	"ipoibcm/verbs"
	"ipoibcm/wire/ip"
)

// A Store keeps descriptors by name for the next process, and closes them if there is none. It is that of
// the service manager ([ADR 0034]).
type Store interface {
	// Put adds descriptors under a name. The caller's own stay open.
	Put(name string, fds ...int) error
	// Remove has the store close the descriptors of a name. They may be open for a while yet.
	Remove(name string) error
}

// Names of what is in a Store.
const (
	StoreTUN     = "tun"     // the interface: there all the time, so that it outlives a crash
	StoreSockets = "sockets" // of the provider: put there when a process ends
	StoreState   = "state"   // a handover.State: put there when a process ends
)

// releasedWithin bounds the wait until the store has closed the TUN.
const releasedWithin = 2 * time.Second

// A Predecessor is what the process before left behind.
type Predecessor struct {
	TUN   *os.File        // nil: none. Run closes it
	State *handover.State // nil: none that can be used
}

// A legacy is what we leave to the next process, and how we took over from the process before.
type legacy struct {
	state   *os.File // filled at the end; made at the start, because the confined process cannot make such a file
	adopted bool     // we go on with the TUN of the process before
	refused bool     // the TUN of the process before was not what we need
	tidied  bool
}

// prepareHandOver makes the file for the state that handOver leaves.
func (a *Agent) prepareHandOver() error {
	if a.opt.Store == nil {
		return nil
	}
	fd, err := unix.MemfdCreate("ipoibcm-state", unix.MFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("make a file for the state: %w", err)
	}
	a.legacy.state = os.NewFile(uintptr(fd), "state")
	return nil
}

// adoptTUN takes over the interface of the process before. It returns nil if there is none that fits o. With
// FewerThreads, an interface that differs from o only in whether it may have several queues fits too.
func (a *Agent) adoptTUN(o tun.Options) *tun.File {
	f := a.opt.Predecessor.TUN
	if f == nil {
		return nil
	}
	a.opt.Predecessor.TUN = nil
	defer f.Close()
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err == nil {
		var t *tun.File
		if t, err = tun.Adopt(fd, o); err != nil && a.opt.FewerThreads {
			o.Queues = !o.Queues
			if other, no := tun.Adopt(fd, o); no == nil {
				t, err = other, nil
			}
		}
		if err == nil {
			a.legacy.adopted = true
			a.log.Info("interface taken over", "name", o.Name)
			return t
		}
		unix.Close(fd)
	}
	a.log.Warn("the interface of the process before is not taken over: it is made anew", "err", err)
	a.legacy.refused = true
	a.storeRemove(StoreTUN)
	return nil
}

// sameLink reports whether the process before was on the link that we are on with gid.
func (a *Agent) sameLink(gid ib.GID) bool {
	s := a.before()
	return s.Link.GID == gid && s.PKey == a.opt.pkey() &&
		s.Underlay == a.opt.Provider.Port().UnderlayIf
}

// openLoop makes the data path. If the process before was on the same link, its UD QPN is kept where
// possible, so that peers need not learn another.
func (a *Agent) openLoop(gid ib.GID) (*datapath.Loop, error) {
	c := datapath.Config{Provider: a.opt.Provider, TUN: a.tun, Queues: a.queues, PKey: a.opt.PKey, QKey: a.opt.QKey,
		UDMTU: mtu.AcceptUD(a.opt.UDMTU), ReceiveMTU: a.opt.ReceiveMTU,
		InheritClass: a.opt.InheritClass, CopyECN: a.opt.CopyECN, OwnTUNThread: a.opt.OwnTUNThread}
	if !a.sameLink(gid) {
		if s := a.opt.Predecessor.State; s != nil {
			a.log.Warn("the process before was on another link: neighbours are learnt anew", "gid", s.Link.GID, "pkey", s.PKey,
				"underlay", s.Underlay)
			a.opt.Predecessor.State.Memory = ipoib.Memory{}
		}
		return datapath.New(c)
	}
	c.UDQPN = a.opt.Predecessor.State.Link.QPN
	l, err := datapath.New(c)
	if errors.Is(err, verbs.ErrInvalid) {
		a.log.Warn("the UD QPN of the process before cannot be had", "qpn", c.UDQPN, "err", err)
		c.UDQPN = 0
		l, err = datapath.New(c)
	}
	return l, err
}

// before returns the state that the process before left; zero if there is none.
func (a *Agent) before() (s handover.State) {
	if left := a.opt.Predecessor.State; left != nil {
		s = *left
	}
	return s
}

// tidy removes what the process before put on an interface that we took over, and that nobody asks for any
// more: its routes, which the machine makes again when it needs them, and addresses that are no longer
// configured.
func (a *Agent) tidy(d *hostnet.Device) error {
	if !a.legacy.adopted || a.legacy.tidied {
		return nil
	}
	a.legacy.tidied = true
	if _, err := d.RemoveOurs(); err != nil {
		return fmt.Errorf("remove routes of the process before: %w", err)
	}
	want := append(slices.Clone(a.live.prefixes()), netip.PrefixFrom(ip.LinkLocal(a.link.GID), 64))
	for _, p := range a.before().Prefixes {
		if slices.Contains(want, p) {
			continue
		}
		if err := d.DelAddr(p); err != nil && !errors.Is(err, hostnet.ErrNotFound) {
			return fmt.Errorf("remove %v of the process before: %w", p, err)
		}
	}
	return nil
}

// keepTUN has the store keep the interface, in whatever way this process ends.
func (a *Agent) keepTUN() {
	if a.opt.Store == nil {
		return
	}
	if err := a.opt.Store.Put(StoreTUN, a.tun.FD()); err != nil {
		a.log.Warn("the interface will not outlive this process", "err", err)
	}
}

func (a *Agent) storeRemove(name string) {
	if a.opt.Store == nil {
		return
	}
	if err := a.opt.Store.Remove(name); err != nil {
		a.log.Warn("the service manager was not told to let go of a descriptor", "name", name, "err", err)
	}
}

// handOver leaves the state and, if the provider can freeze them, its sockets to the next process. It returns
// true if nothing is left to do, and false if the caller has to say goodbye to the peers. Packets that arrive
// from now on wait at the frozen sockets, and packets of the host wait at the TUN. handOver tells the peers
// that their connections have ended. They dial again, or are dialled, when there is a packet.
func (a *Agent) handOver() bool {
	a.hub.publish(a.event("agent", "stopping", "handing over to the next process"))
	<-a.service.told // the service manager hears that we stop before it gets descriptors
	state := a.state()
	p, ok := a.opt.Provider.(verbs.Successor)
	if !ok { // the next process has another QPN, so drive says goodbye for ours
		a.leave(&state, nil)
		return false
	}
	if err := a.tun.LeaveQueues(); err != nil {
		a.log.Warn("packets may be lost", "err", err)
	}
	fds, err := p.Freeze()
	if err != nil {
		a.log.Warn("sockets are not handed over", "err", err)
	}
	defer func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
	}()
	a.step(ipoib.HandOver{})
	a.leave(&state, fds)
	return true
}

// leave puts the state and sockets into the store.
func (a *Agent) leave(s *handover.State, sockets []int) {
	b, err := s.AppendBinary(nil)
	if err == nil {
		_, err = a.legacy.state.WriteAt(b, 0)
	}
	if err == nil {
		err = a.opt.Store.Put(StoreState, int(a.legacy.state.Fd()))
	}
	if err == nil && len(sockets) > 0 {
		err = a.opt.Store.Put(StoreSockets, sockets...)
	}
	if err != nil {
		a.log.Warn("the next process begins anew", "err", err)
		return
	}
	a.log.Info("handed over", "neighbours", len(s.Memory.Neighbours), "peers", len(s.Memory.Peers),
		"sockets", len(sockets), "octets", len(b))
}

// state returns what the next process has to know.
func (a *Agent) state() handover.State {
	port := a.opt.Provider.Port()
	s := handover.State{Name: a.opt.Name, Underlay: port.UnderlayIf, Link: a.link, GUID: port.GUID,
		PKey: a.opt.pkey(), QKey: cmp.Or(a.opt.QKey, ib.QKeyIPoIB),
		Proven: a.tun.Proven(), Prefixes: slices.Clone(a.live.prefixes()), Memory: a.m.Memory()}
	for _, x := range a.m.Status().Addrs {
		if x.Ours && !slices.Contains(s.Prefixes, x.Prefix) {
			s.Prefixes = append(s.Prefixes, x.Prefix)
		}
	}
	return s
}

// ReadState reads the state that the process before left. It trusts the file as little as a packet from an
// unknown source.
func ReadState(f *os.File) (*handover.State, error) {
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() || st.Size() > handover.MaxLen {
		return nil, fmt.Errorf("a file of mode %v with %d octets", st.Mode(), st.Size())
	}
	b, err := io.ReadAll(io.NewSectionReader(f, 0, st.Size()))
	if err != nil {
		return nil, err
	}
	s := new(handover.State)
	if err := s.UnmarshalBinary(b); err != nil {
		return nil, err
	}
	return s, nil
}
