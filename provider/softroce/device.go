// Package softroce is RoCEv2 in pure Go: a verbs provider whose wire is UDP
// port 4791 on any network device.
//
// It moves octets, sockets and goroutines; what a packet means is decided in
// provider/softroce/engine, whose machines it drives. Its packets are those
// that Linux rdma_rxe and hardware speak. Sources: design D1, D2, D3, D10, D12
// and the wire facts on RoCEv2 and UDP sockets.
package softroce

import (
	"ipoibcm/verbs"
)

// A Device is one underlay network device, open as an RDMA device.
// It implements [verbs.Provider].
type Device struct {
	opts Options
}

var _ verbs.Provider = (*Device)(nil)

// Open opens the underlay device. It waits up to 5 s for an address that is
// still tentative.
func Open(opts Options) (*Device, error) {
	return nil, verbs.ErrNotSupported
}

// Caps implements [verbs.Provider].
func (d *Device) Caps() verbs.Caps { return verbs.Caps{} }

// Port implements [verbs.Provider].
func (d *Device) Port() verbs.Port { return verbs.Port{} }

// Alloc implements [verbs.Provider].
func (d *Device) Alloc(n int) (*verbs.Region, error) { return nil, verbs.ErrNotSupported }

// Register implements [verbs.Provider].
func (d *Device) Register(buf []byte, access verbs.Access) (*verbs.Region, error) {
	return nil, verbs.ErrNotSupported
}

// Deregister implements [verbs.Provider].
func (d *Device) Deregister(r *verbs.Region) error { return verbs.ErrNotSupported }

// CreateCQ implements [verbs.Provider].
func (d *Device) CreateCQ(depth int) (verbs.CQ, error) { return nil, verbs.ErrNotSupported }

// CreateSRQ implements [verbs.Provider].
func (d *Device) CreateSRQ(init verbs.SRQInit) (verbs.SRQ, error) { return nil, verbs.ErrNotSupported }

// CreateQP implements [verbs.Provider].
func (d *Device) CreateQP(init verbs.QPInit) (verbs.QP, error) { return nil, verbs.ErrNotSupported }

// CreateAH implements [verbs.Provider].
func (d *Device) CreateAH(attr verbs.AHAttr) (verbs.AH, error) { return nil, verbs.ErrNotSupported }

// MADPort implements [verbs.Provider].
func (d *Device) MADPort() verbs.MADPort { return nil }

// Events implements [verbs.Provider].
func (d *Device) Events() <-chan verbs.Event { return nil }

// SetTap implements [verbs.Provider].
func (d *Device) SetTap(t verbs.Tap) {}

// Counters implements [verbs.Provider].
func (d *Device) Counters(f func(name string, value uint64)) {}

// Close implements [verbs.Provider].
func (d *Device) Close() error { return nil }
