package softroce

import (
	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

// A datagramFilter keeps the arguments of [Device.FilterDatagrams].
type datagramFilter struct {
	qpn  ib.QPN
	pass func(src ib.GID, srcQPN ib.QPN, payload []byte) bool
}

var _ verbs.FloodFilterer = (*Device)(nil)

// FilterDatagrams implements [verbs.DatagramFilterer].
func (d *Device) FilterDatagrams(qpn ib.QPN, pass func(src ib.GID, srcQPN ib.QPN, payload []byte) bool) {
	if pass == nil || d.opts.NoLimits {
		d.filter.Store(nil)
		d.FilterFlood(nil)
		return
	}
	d.filter.Store(&datagramFilter{qpn, pass})
}

// refused reports whether the filter refuses p, whose ICRC is not checked yet.
func (d *Device) refused(src ib.GID, p *roce.Packet) bool {
	f := d.filter.Load()
	if f == nil {
		return false
	}
	deth := p.DETH()
	if deth == nil {
		return false
	}
	if to := p.BTH.DestQPN(); to != f.qpn && to != ib.QPNMulticast {
		return false
	}
	return !f.pass(src, deth.SrcQPN(), p.Payload)
}
