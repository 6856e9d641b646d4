//go:build ibverbs && cgo

package ibverbs

// #cgo LDFLAGS: -libverbs
// #cgo noescape shim_post_send
// #cgo nocallback shim_post_send
// #cgo noescape shim_post_recv
// #cgo nocallback shim_post_recv
// #cgo noescape shim_poll
// #cgo nocallback shim_poll
// #include <stdlib.h>
// #include "shim.h"
import "C"

import (
	"cmp"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/verbs/events"
)

// Built is true if this program was built with libibverbs.
const Built = true

const (
	// maxDepth and maxSGE bound queues, even if the device would take more.
	maxDepth = 1 << 15
	maxSGE   = 16
	// readGIDs makes room for someGIDs entries of the GID table at first, and for maxGIDs at most.
	someGIDs, maxGIDs = 256, 64 << 10
)

// A Device is one port of an RDMA device. It implements [verbs.Provider].
type Device struct {
	opts    Options
	log     *slog.Logger
	caps    verbs.Caps
	name    string
	verbsFS string // the device's directory of class infiniband_verbs
	port    int
	ifindex int
	guid    ib.GUID
	groups  memberships
	mads    *gsiUser // nil if this Device does not get CM messages
	madErr  error
	subnet  *SAPort // InfiniBand
	monitor *monitor
	async   *os.File
	fatal   chan string // tells the watcher that the device is gone

	state atomic.Pointer[portState]
	tap   events.Tap
	count counts

	// life is read-locked while ctx and pd are in use.
	life sync.RWMutex
	ctx  *C.struct_ibv_context // nil if the device is gone or closed
	pd   *C.struct_ibv_pd

	closing atomic.Bool
	gen     atomic.Uint32 // counts generations of QPs and numbers of SRQs
	wg      sync.WaitGroup

	create  sync.Mutex // held by CreateQP: two at a time could lock their completion queues in opposite orders
	mu      sync.RWMutex
	qps     map[ib.QPN]*qp
	cqs     map[*cq]struct{}
	srqs    map[uint32]*srq
	ahs     map[*ah]struct{}
	regions map[*verbs.Region]*region

	events *events.Queue
}

var _ verbs.Provider = (*Device)(nil)

// infiniBand reports whether the port was opened as an InfiniBand one, without a network device.
func (d *Device) infiniBand() bool { return d.opts.Underlay == "" }

// Open opens the port of an RDMA device that belongs to the underlay, or an InfiniBand port.
func Open(opts Options) (verbs.Provider, error) {
	d := &Device{opts: opts, qps: map[ib.QPN]*qp{}, cqs: map[*cq]struct{}{}, srqs: map[uint32]*srq{},
		ahs:     map[*ah]struct{}{},
		regions: map[*verbs.Region]*region{}, fatal: make(chan string, 1)}
	d.events = events.NewQueue(&d.count.eventsDropped)
	if d.log = opts.log(); opts.Underlay != "" {
		d.log = d.log.With("underlay", opts.Underlay)
	}
	var b [8]byte
	rand.Read(b[:]) // never fails
	// The GUID is that of this agent, not of the adapter, which two agents may share.
	d.guid = ib.GUID(binary.BigEndian.Uint64(b[:])&^(1<<56) | 1<<57)
	if err := d.open(); err != nil {
		return nil, errors.Join(err, d.release())
	}
	p := d.state.Load()
	d.log.Info("ibverbs open", "device", d.name, "port", d.port, "gids", p.GIDs, "mtu", p.MTU.Octets(),
		"cm", d.mads != nil)
	return d, nil
}

func (d *Device) open() (err error) {
	if d.monitor, err = newMonitor(); err != nil { // before the first look, so that no change is missed
		return err
	}
	if err = d.find(); err != nil {
		return err
	}
	if err := d.openContext(); err != nil {
		return err
	}
	if err := d.waitGID(); err != nil {
		return err
	}
	if err := d.queryCaps(); err != nil {
		return err
	}
	if d.async, err = pollable(int(d.ctx.async_fd), "async events"); err != nil {
		return err
	}
	if !d.opts.NoCM {
		d.openCM()
	}
	d.caps.MAD = d.mads != nil
	if d.infiniBand() {
		if d.subnet, err = OpenSA(d.name, d.port, d.pkeys); err != nil {
			return fmt.Errorf("subnet administration of %s port %d: %w", d.name, d.port, err)
		}
	}
	d.wg.Go(d.readAsync)
	d.wg.Go(d.watch)
	return nil
}

// find sets the names of the device and the port to open.
func (d *Device) find() error {
	d.name, d.port = d.opts.Device, cmp.Or(d.opts.Port, 1)
	if d.infiniBand() {
		return nil
	}
	link, err := netlink.LinkByName(d.opts.Underlay)
	if err != nil {
		return fmt.Errorf("underlay %s: %w", d.opts.Underlay, err)
	}
	d.ifindex = link.Attrs().Index
	d.groups.ifindex = d.ifindex
	if d.name == "" {
		d.name, err = findDevice(d.opts.Underlay)
	}
	return err
}

// openContext opens the device by its name and allocates its protection domain.
func (d *Device) openContext() error {
	var n C.int
	list, err := C.ibv_get_device_list(&n)
	if list == nil {
		return fmt.Errorf("list RDMA devices (is ib_uverbs loaded?): %w", err)
	}
	defer C.ibv_free_device_list(list)
	for _, dev := range unsafe.Slice(list, int(n)) {
		if C.GoString(C.ibv_get_device_name(dev)) != d.name {
			continue
		}
		if dev.transport_type == C.IBV_TRANSPORT_IWARP {
			return fmt.Errorf("RDMA device %s is iWARP, which has no datagrams", d.name)
		}
		d.verbsFS = C.GoString(&dev.dev_path[0])
		if d.ctx, err = C.ibv_open_device(dev); d.ctx == nil {
			return fmt.Errorf("open RDMA device %s (are its nodes in /dev/infiniband, and may we use them?): %w", d.name, err)
		}
		if d.pd, err = C.ibv_alloc_pd(d.ctx); d.pd == nil {
			return fmt.Errorf("%s: protection domain: %w", d.name, err)
		}
		return nil
	}
	return fmt.Errorf(
		"libibverbs does not know RDMA device %s: is its driver (package ibverbs-providers) installed, and ib_uverbs "+
			"loaded?", d.name)
}

// waitGID waits until there is a GID to use, then reads the port's state.
func (d *Device) waitGID() error {
	end := time.Now().Add(d.opts.addressWait())
	for {
		all, soon, err := d.readGIDs()
		if err != nil {
			return err
		}
		// An IPv4 address is taken only when no IPv6 one is expected any more.
		t := d.choose(all, ib.GID{})
		if len(t) > 0 && (!t[0].gid.Is4() || !d.opts.GID.IsZero() || !soon || time.Now().After(end)) {
			d.port = t[0].port
			break
		}
		if time.Now().After(end) {
			if d.infiniBand() {
				return fmt.Errorf("port %d of %s has no GID", d.port, d.name)
			}
			if g := d.opts.GID; !g.IsZero() {
				return fmt.Errorf("%s has no RoCE v2 GID %v on %s; it has %v", d.name, g, d.opts.Underlay,
					chooseGIDs(all, d.ifindex, ib.GID{}, ib.GID{}).gids())
			}
			return fmt.Errorf("%s has no RoCE v2 GID on %s: give that an address", d.name, d.opts.Underlay)
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-d.opts.Stop:
			return ErrStopped
		}
	}
	now, err := d.read(ib.GID{})
	if err != nil {
		return err
	}
	if now.MTU == 0 {
		return fmt.Errorf("%s port %d has no path MTU", d.name, d.port)
	}
	d.state.Store(now)
	return nil
}

func (d *Device) queryCaps() error {
	var dev C.struct_ibv_device_attr
	if rc := C.ibv_query_device(d.ctx, &dev); rc != 0 {
		return fmt.Errorf("query %s: %w", d.name, syscall.Errno(rc))
	}
	port, err := d.queryPort()
	if err != nil {
		return err
	}
	d.caps = verbs.Caps{
		Name: "ibverbs", Device: d.name, RC: true, UC: true, UD: true, RDMA: true,
		SRQ: dev.max_srq > 0, Multicast: dev.max_mcast_grp > 0,
		MaxMessage: int(min(port.max_msg_sz, math.MaxInt32)), MaxUDPayload: d.state.Load().MTU.Octets(),
		MaxSGE: min(int(dev.max_sge), maxSGE), MaxQPDepth: min(int(dev.max_qp_wr), maxDepth),
	}
	return nil
}

func (d *Device) queryPort() (port C.struct_ibv_port_attr, err error) {
	if rc := C.shim_port(d.ctx, C.int(d.port), &port); rc != 0 {
		return port, fmt.Errorf("query port %d of %s: %w", d.port, d.name, syscall.Errno(rc))
	}
	return port, nil
}

// openCM registers for the port's CM messages. If that fails, for example because another process
// has them, it keeps the error for MADError.
func (d *Device) openCM() {
	var keys [4]uint64
	_ = binary.Read(rand.Reader, binary.NativeEndian, &keys) // never fails
	node, err := findUMAD(classMAD, d.name, d.port)
	if err == nil {
		open := func(gids func() gidTable, pkeys func() []ib.PKey) (*madPort, error) {
			return openMADs(node, d.infiniBand(), gids, pkeys, keys, d.log)
		}
		d.mads, err = shareMADs(node, open, cmView{gids: func() gidTable { return d.state.Load().table }, pkeys: d.pkeys,
			serves: d.servesUD, inPartition: d.inPartition})
	}
	if err != nil {
		d.madErr = err
		d.log.Info("no CM messages through QP 1", "why", err)
	}
}

func (d *Device) pkeys() []ib.PKey { return d.state.Load().PKeys }

// servesUD reports whether qpn is a UD QP of this Device.
func (d *Device) servesUD(qpn ib.QPN) bool {
	d.mu.RLock()
	defer d.mu.RUnlock()
	q := d.qps[qpn]
	return q != nil && q.transport == ib.UD
}

// inPartition reports whether a UD QP of this Device is in partition k.
func (d *Device) inPartition(k ib.PKey) bool {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.userOf(func(q *qp) bool { return q.transport == ib.UD && (q.pkey^k)&^ib.PKeyFull == 0 }) != nil
}

// SubnetPort implements [verbs.SubnetProvider].
func (d *Device) SubnetPort() verbs.SubnetPort {
	if d.subnet == nil {
		return nil
	}
	return d.subnet
}

// MADError returns why this Device could not get CM messages. It is nil if it gets them, or if
// Options.NoCM is set.
func (d *Device) MADError() error { return d.madErr }

// pollable returns a non-blocking file for a copy of fd, which Go's poller can wait for. libibverbs
// closes fd itself.
func pollable(fd int, name string) (*os.File, error) {
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err == nil {
		if err = unix.SetNonblock(dup, true); err == nil {
			return os.NewFile(uintptr(dup), name), nil
		}
		unix.Close(dup)
	}
	return nil, fmt.Errorf("poll %s: %w", name, err)
}

// readGIDs reads the GID table. On Ethernet it leaves out the entries whose address the underlay
// does not have or cannot use yet. soon is true if it expects more entries.
func (d *Device) readGIDs() (all []gidEntry, soon bool, err error) {
	// The kernel reads all entries of the device, those of other ports and VLANs too, or none.
	buf, n := []C.struct_shim_gid(nil), -int(syscall.EINVAL)
	for size := someGIDs; n == -int(syscall.EINVAL) && size <= maxGIDs; size *= 4 {
		buf = make([]C.struct_shim_gid, size)
		n = int(C.shim_gids(d.ctx, &buf[0], C.int(size)))
	}
	if n < 0 {
		return nil, false, fmt.Errorf("read the GIDs of %s: %w", d.name, syscall.Errno(-n))
	}
	for _, g := range buf[:n] {
		all = append(all, gidEntry{gid: *(*ib.GID)(unsafe.Pointer(&g.gid)), index: int(g.index), port: int(g.port),
			kind: int(g._type), ifindex: int(g.ifindex)})
	}
	if d.infiniBand() {
		return all, false, nil
	}
	addrs, tentative, err := d.monitor.addresses(d.ifindex)
	if err != nil {
		return nil, false, fmt.Errorf("addresses of %s: %w", d.opts.Underlay, err)
	}
	all = withAddress(all, addrs)
	have := chooseGIDs(all, d.ifindex, ib.GID{}, ib.GID{}).gids()
	lacks := func(g ib.GID) bool { return !g.Is4() && !slices.Contains(have, g) }
	return all, tentative || slices.ContainsFunc(addrs, lacks), nil
}

// choose returns the entries of the table that belong to the port, the default one first.
func (d *Device) choose(all []gidEntry, prefer ib.GID) gidTable {
	if d.infiniBand() {
		return chooseIB(all, d.port, d.opts.GID)
	}
	return chooseGIDs(all, d.ifindex, d.opts.GID, prefer)
}

// A portState is the port at one moment. It is immutable.
type portState struct {
	verbs.Port
	table gidTable
}

// unusable returns s as it is when nothing can be read of the port any more.
func (s portState) unusable() *portState {
	s.Active, s.GIDs, s.table = false, nil, nil
	return &s
}

// read returns the port's current state, with prefer as the first GID if it is still there.
func (d *Device) read(prefer ib.GID) (*portState, error) {
	all, _, err := d.readGIDs()
	if err != nil {
		return nil, err
	}
	port, err := d.queryPort()
	if err != nil {
		return nil, err
	}
	p := &portState{table: d.choose(all, prefer)}
	p.Port = verbs.Port{GIDs: p.table.gids(), GUID: d.guid, LID: ib.PermissiveLID, MTU: ib.MTU(port.active_mtu)}
	p.Active = port.state == C.IBV_PORT_ACTIVE && len(p.GIDs) > 0
	for i := range C.int(port.pkey_tbl_len) {
		var k C.__be16
		if C.ibv_query_pkey(d.ctx, C.uint8_t(d.port), i, &k) != 0 {
			break
		}
		p.PKeys = append(p.PKeys, ib.PKey(binary.BigEndian.Uint16((*[2]byte)(unsafe.Pointer(&k))[:])))
	}
	isIB := port.link_layer == C.IBV_LINK_LAYER_INFINIBAND
	switch {
	case isIB && d.infiniBand():
		p.InfiniBand, p.LID, p.SMLID, p.SMSL = true, ib.LID(port.lid), ib.LID(port.sm_lid), uint8(port.sm_sl)
		p.SubnetTimeout, p.GRHRequired = ib.Timeout(port.subnet_timeout), port.flags&C.IBV_QPF_GRH_REQUIRED != 0
		return p, nil
	case isIB:
		return nil, fmt.Errorf("port %d of %s is InfiniBand: give --device and --port, and no --underlay", d.port, d.name)
	case d.infiniBand():
		return nil, fmt.Errorf("port %d of %s is not InfiniBand: give its --underlay", d.port, d.name)
	}
	link, err := d.monitor.handle.LinkByIndex(d.ifindex)
	if err != nil {
		return nil, fmt.Errorf("underlay %s: %w", d.opts.Underlay, err)
	}
	at := link.Attrs()
	p.UnderlayIf, p.UnderMTU = at.Name, at.MTU
	p.Active = p.Active && at.Flags&net.FlagUp != 0 && at.RawFlags&unix.IFF_RUNNING != 0
	return p, nil
}

// Caps implements [verbs.Provider].
func (d *Device) Caps() verbs.Caps { return d.caps }

// Port implements [verbs.Provider].
func (d *Device) Port() verbs.Port { return d.state.Load().Port }

// MADPort implements [verbs.Provider].
func (d *Device) MADPort() verbs.MADPort {
	if d.mads == nil {
		return nil
	}
	return d.mads
}

// Events implements [verbs.Provider].
func (d *Device) Events() <-chan verbs.Event { return d.events.Events() }

// SetTap implements [verbs.Provider]. The tap's packets are synthesised from work requests and
// completions.
func (d *Device) SetTap(t verbs.Tap) { d.tap.Set(t) }

// remember puts an object into a map of d.
func remember[K comparable, V any](d *Device, objects map[K]V, key K, object V) {
	d.mu.Lock()
	defer d.mu.Unlock()
	objects[key] = object
}

// userOf returns a QP for which uses holds, nil if there is none. d.mu is held.
func (d *Device) userOf(uses func(*qp) bool) *qp {
	for _, q := range d.qps {
		if uses(q) {
			return q
		}
	}
	return nil
}

// use keeps the device open. Unless it returns an error, the caller must call d.life.RUnlock.
func (d *Device) use() error {
	d.life.RLock()
	if d.ctx == nil || d.closing.Load() {
		d.life.RUnlock()
		return verbs.ErrClosed
	}
	return nil
}

// Close implements [verbs.Provider].
func (d *Device) Close() error {
	if d.closing.Swap(true) {
		return verbs.ErrClosed
	}
	return d.release()
}

func (d *Device) closeMADs() {
	if d.mads != nil {
		d.mads.close()
	}
	if d.subnet != nil {
		_ = d.subnet.Close()
	}
}

// release ends the goroutines and releases what open allocated.
func (d *Device) release() error {
	d.closeMADs()
	if d.monitor != nil {
		d.monitor.stop()
	}
	if d.async != nil {
		d.async.Close()
	}
	d.wg.Wait()
	err := d.teardown()
	if d.monitor != nil {
		d.monitor.close()
	}
	d.groups.close()
	d.mu.Lock()
	cqs := d.cqs
	d.cqs = nil
	d.mu.Unlock()
	for c := range cqs {
		c.end()
	}
	d.events.Close()
	return err
}

// teardown destroys everything in the device and closes it: the kernel may be waiting for that to
// remove the device. The objects that the user has stay, and return errors.
func (d *Device) teardown() error {
	d.life.Lock()
	defer d.life.Unlock()
	d.mu.Lock()
	qps, srqs, ahs, regions := d.qps, d.srqs, d.ahs, d.regions
	d.qps, d.srqs, d.ahs, d.regions = map[ib.QPN]*qp{}, map[uint32]*srq{}, map[*ah]struct{}{}, map[*verbs.Region]*region{}
	cqs := slices.Collect(maps.Keys(d.cqs))
	d.mu.Unlock()
	for _, q := range qps {
		_ = q.destroy() // the device may be gone
	}
	for _, s := range srqs {
		_ = s.destroy()
	}
	for _, c := range cqs {
		c.free()
	}
	for a := range ahs {
		a.free()
	}
	for _, r := range regions {
		r.free()
	}
	if d.pd != nil {
		C.ibv_dealloc_pd(d.pd)
		d.pd = nil
	}
	if d.ctx != nil {
		C.ibv_close_device(d.ctx)
		d.ctx = nil
	}
	return nil
}

// present reports whether the kernel still has the device.
func (d *Device) present() bool {
	_, err := os.Stat(filepath.Join(d.verbsFS, "ibdev"))
	return err == nil
}

// errno returns the error for rc, the result of a libibverbs call; nil for 0.
func errno(what string, rc C.int) error {
	if rc == 0 {
		return nil
	}
	return wrapErrno(what, syscall.Errno(rc))
}

func wrapErrno(what string, err error) error {
	switch {
	case errors.Is(err, syscall.ENOMEM), errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EAGAIN):
		return fmt.Errorf("%w: %s: %w", verbs.ErrNoResources, what, err)
	case errors.Is(err, syscall.EINVAL):
		return fmt.Errorf("%w: %s: %w", verbs.ErrInvalid, what, err)
	case errors.Is(err, syscall.EOPNOTSUPP), errors.Is(err, syscall.ENOSYS):
		return fmt.Errorf("%w: %s: %w", verbs.ErrNotSupported, what, err)
	}
	return fmt.Errorf("%s: %w", what, err)
}
