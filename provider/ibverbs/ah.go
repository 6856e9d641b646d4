//go:build ibverbs && cgo

package ibverbs

// #include "shim.h"
import "C"

import (
	"cmp"
	"fmt"
	"sync"
	"unsafe"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// An ah is an address handle.
type ah struct {
	dev  *Device
	attr verbs.AHAttr
	from gidEntry

	mu sync.Mutex
	h  *C.struct_ibv_ah // nil after free
}

var _ verbs.AH = (*ah)(nil)

// CreateAH implements [verbs.Provider]. The kernel may have to resolve the destination, which takes
// up to some seconds if nobody answers.
func (d *Device) CreateAH(attr verbs.AHAttr) (verbs.AH, error) {
	if err := d.use(); err != nil {
		return nil, err
	}
	defer d.life.RUnlock()
	p, from, err := d.path(attr)
	if err != nil {
		return nil, err
	}
	h, err := C.shim_create_ah(d.pd, &p)
	if h == nil {
		return nil, wrapErrno(fmt.Sprintf("address handle for %v", attr.DGID), err)
	}
	a := &ah{dev: d, attr: attr, from: from, h: h}
	remember(d, d.ahs, a, struct{}{})
	return a, nil
}

// path returns attr in libibverbs' form, with the current index of the source GID. from is the
// entry of that GID.
func (d *Device) path(attr verbs.AHAttr) (p C.struct_shim_path, from gidEntry, err error) {
	from, ok := d.state.Load().table.source(attr.SGID, attr.DGID)
	if d.infiniBand() {
		return d.pathIB(attr)
	}
	switch {
	case attr.DGID.IsZero():
		return p, from, fmt.Errorf("%w: no destination", verbs.ErrInvalid)
	case !ok:
		return p, from, fmt.Errorf("%w: %s has no GID %v of the family of %v", verbs.ErrInvalid, d.opts.Underlay,
			attr.SGID, attr.DGID)
	case from.gid.Is4() != attr.DGID.Is4():
		return p, from, fmt.Errorf("%w: %v and %v are of different families", verbs.ErrInvalid, from.gid, attr.DGID)
	}
	*(*ib.GID)(unsafe.Pointer(&p.dgid)) = attr.DGID
	p.sgid_index, p.port = C.uint32_t(from.index), C.uint32_t(d.port)
	p.flow_label, p.traffic_class = C.uint32_t(attr.FlowLabel&0xfffff), C.uint8_t(attr.TrafficClass)
	p.hop_limit, p.sl, p.grh = C.uint8_t(cmp.Or(attr.HopLimit, 64)), C.uint8_t(attr.SL), 1
	return p, from, nil
}

// pathIB is path for InfiniBand: the LID leads to the destination, and packets carry a GRH if
// attr.GRH is set.
func (d *Device) pathIB(attr verbs.AHAttr) (p C.struct_shim_path, from gidEntry, err error) {
	from, ok := d.state.Load().table.source(attr.SGID, attr.SGID)
	switch {
	case attr.LID == 0:
		return p, from, fmt.Errorf("%w: no LID of %v", verbs.ErrInvalid, attr.DGID)
	case !ok:
		return p, from, fmt.Errorf("%w: %s port %d has no GID %v", verbs.ErrInvalid, d.name, d.port, attr.SGID)
	}
	p.port, p.dlid, p.sl, p.rate = C.uint32_t(d.port), C.uint16_t(attr.LID), C.uint8_t(attr.SL), C.uint8_t(attr.Rate)
	if attr.GRH {
		*(*ib.GID)(unsafe.Pointer(&p.dgid)) = attr.DGID
		p.grh, p.sgid_index, p.hop_limit = 1, C.uint32_t(from.index), C.uint8_t(attr.HopLimit)
		p.flow_label, p.traffic_class = C.uint32_t(attr.FlowLabel&0xfffff), C.uint8_t(attr.TrafficClass)
	}
	return p, from, nil
}

// Attr implements [verbs.AH].
func (a *ah) Attr() verbs.AHAttr { return a.attr }

// Destroy implements [verbs.AH].
func (a *ah) Destroy() error {
	a.dev.mu.Lock()
	delete(a.dev.ahs, a)
	a.dev.mu.Unlock()
	if !a.free() {
		return verbs.ErrClosed
	}
	return nil
}

func (a *ah) free() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.h == nil {
		return false
	}
	C.ibv_destroy_ah(a.h)
	a.h = nil
	return true
}

// handle returns the pointer that a work request needs; 0 after Destroy.
func (a *ah) handle() C.uint64_t {
	a.mu.Lock()
	defer a.mu.Unlock()
	return C.uint64_t(uintptr(unsafe.Pointer(a.h)))
}
