package softroce

import (
	"encoding/binary"
	"fmt"
	"slices"
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
	for _, q := range t.bucket(n) {
		if q.qpn == n {
			return q
		}
	}
	return nil
}

// bucket returns the queue pairs in the bucket of n.
func (t *qpTable) bucket(n ib.QPN) []*qp {
	if b := t.buckets[n%qpBuckets].Load(); b != nil {
		return *b
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
	if want != 0 && (want <= ib.QPNGSI || want >= ib.QPNMulticast || t.lookup(want) != nil) {
		return fmt.Errorf("%w: QPN %v cannot be had", verbs.ErrInvalid, want)
	}
	for q.qpn = want; q.qpn == 0; {
		var r [4]byte
		random(r[:])
		n := c.of(ib.QPN(binary.LittleEndian.Uint32(r[:])) & ib.QPNMask)
		if _, tired := t.resting[n]; n > ib.QPNGSI && n != ib.QPNMulticast && !tired && t.lookup(n) == nil {
			q.qpn = n
		}
	}
	build(q.qpn)
	list := append(slices.Clone(t.bucket(q.qpn)), q)
	t.buckets[q.qpn%qpBuckets].Store(&list)
	t.n++
	return nil
}

func (t *qpTable) remove(q *qp) {
	t.mu.Lock()
	defer t.mu.Unlock()
	list := slices.Clone(t.bucket(q.qpn))
	i := slices.Index(list, q)
	if i < 0 {
		return
	}
	list = slices.Delete(list, i, i+1)
	t.buckets[q.qpn%qpBuckets].Store(&list)
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
		qs = append(qs, t.bucket(ib.QPN(i))...)
	}
	return qs
}
