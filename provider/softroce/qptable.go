package softroce

import (
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// Bounds of the queue pair table.
const (
	maxQPs    = 1 << 17
	qpBuckets = 1 << 10
	// qpnRest is how many QPNs rest after use, so that late packets of an old
	// connection do not reach a new one.
	qpnRest = 4096
)

// A qpTable finds queue pairs by number. Lookups take no lock: a bucket is an
// immutable slice that changes replace.
type qpTable struct {
	buckets [qpBuckets]atomic.Pointer[[]*qp]

	mu      sync.Mutex
	n       int
	resting map[ib.QPN]struct{}
	rest    []ib.QPN // ring, oldest at restAt once it is full
	restAt  int
}

func (t *qpTable) lookup(n ib.QPN) *qp {
	b := t.buckets[n%qpBuckets].Load()
	if b == nil {
		return nil
	}
	for _, q := range *b {
		if q.qpn == n {
			return q
		}
	}
	return nil
}

// insert gives q the QPN want, or an unpredictable one of class c if want is zero. It calls build
// with the QPN, then puts q into the table.
func (t *qpTable) insert(q *qp, want ib.QPN, c qpnClass, random func([]byte), build func(ib.QPN)) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.n >= maxQPs {
		return verbs.ErrNoResources
	}
	for want == 0 {
		var r [4]byte
		random(r[:])
		n := c.of(ib.QPN(binary.LittleEndian.Uint32(r[:])) & ib.QPNMask)
		if _, tired := t.resting[n]; n <= ib.QPNGSI || n == ib.QPNMulticast || tired || t.lookup(n) != nil {
			continue
		}
		q.qpn = n
		break
	}
	if want != 0 {
		if want <= ib.QPNGSI || want >= ib.QPNMulticast || t.lookup(want) != nil {
			return fmt.Errorf("%w: QPN %v cannot be had", verbs.ErrInvalid, want)
		}
		q.qpn = want
	}
	build(q.qpn)
	b := &t.buckets[q.qpn%qpBuckets]
	var list []*qp
	if old := b.Load(); old != nil {
		list = append(list, *old...)
	}
	list = append(list, q)
	b.Store(&list)
	t.n++
	return nil
}

func (t *qpTable) remove(q *qp) {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := &t.buckets[q.qpn%qpBuckets]
	old := b.Load()
	if old == nil {
		return
	}
	var list []*qp
	for _, o := range *old {
		if o != q {
			list = append(list, o)
		}
	}
	if len(list) == len(*old) {
		return
	}
	if len(list) > 0 {
		b.Store(&list)
	} else {
		b.Store(nil)
	}
	t.n--
	if t.resting == nil {
		t.resting = make(map[ib.QPN]struct{})
	}
	t.resting[q.qpn] = struct{}{}
	if len(t.rest) < qpnRest {
		t.rest = append(t.rest, q.qpn)
		return
	}
	delete(t.resting, t.rest[t.restAt])
	t.rest[t.restAt] = q.qpn
	t.restAt = (t.restAt + 1) % qpnRest
}

// all returns the queue pairs there are, in no order.
func (t *qpTable) all() []*qp {
	var qs []*qp
	for i := range t.buckets {
		if b := t.buckets[i].Load(); b != nil {
			qs = append(qs, *b...)
		}
	}
	return qs
}
