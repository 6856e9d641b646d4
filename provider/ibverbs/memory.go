//go:build ibverbs && cgo

package ibverbs

// #include "shim.h"
import "C"

import (
	"runtime"
	"unsafe"

	"ipoibcm/verbs"
	"ipoibcm/verbs/regions"
)

// A region is memory that the device may use. It is Go memory, and pinned: until free the kernel
// holds its pages, and C and peers use its address. To use the memory after the device was closed
// does no harm.
type region struct {
	mr  *C.struct_ibv_mr
	pin runtime.Pinner
}

func (r *region) free() {
	if r.mr != nil {
		C.ibv_dereg_mr(r.mr)
		r.mr = nil
		r.pin.Unpin()
	}
}

// Alloc implements [verbs.Provider].
func (d *Device) Alloc(n int) (*verbs.Region, error) {
	if n <= 0 {
		return nil, verbs.ErrInvalid
	}
	return d.Register(regions.Alloc(n), 0)
}

// Register implements [verbs.Provider].
func (d *Device) Register(buf []byte, access verbs.Access) (*verbs.Region, error) {
	if len(buf) == 0 {
		return nil, verbs.ErrInvalid
	}
	if err := d.use(); err != nil {
		return nil, err
	}
	defer d.life.RUnlock()
	flags := C.IBV_ACCESS_LOCAL_WRITE | accessFlags(access)
	r := &region{}
	r.pin.Pin(&buf[0])
	addr := uint64(uintptr(unsafe.Pointer(&buf[0])))
	mr, err := C.shim_reg_mr(d.pd, C.uint64_t(addr), C.uint64_t(len(buf)), flags)
	if mr == nil {
		r.pin.Unpin()
		return nil, wrapErrno("register memory (the limit of locked memory, ulimit -l, counts)", err)
	}
	r.mr = mr
	v := &verbs.Region{Buf: buf, Addr: addr, LKey: uint32(mr.lkey), RKey: uint32(mr.rkey)}
	remember(d, d.regions, v, r)
	return v, nil
}

func accessFlags(a verbs.Access) (flags C.int) {
	if a&verbs.RemoteWrite != 0 {
		flags |= C.IBV_ACCESS_REMOTE_WRITE
	}
	if a&verbs.RemoteRead != 0 {
		flags |= C.IBV_ACCESS_REMOTE_READ
	}
	return flags
}

// Deregister implements [verbs.Provider].
func (d *Device) Deregister(v *verbs.Region) error {
	if err := d.use(); err != nil {
		return err
	}
	defer d.life.RUnlock()
	d.mu.Lock()
	r := d.regions[v]
	delete(d.regions, v)
	d.mu.Unlock()
	if r == nil {
		return verbs.ErrInvalid
	}
	r.free()
	return nil
}
