package neigh

// enqueue lets pkt wait for e. Where a bound of this neighbour would be passed,
// its oldest packets go (RFC 4861 section 7.2.2): the latest ones are the ones
// somebody still waits for. The bound of all neighbours costs only the neighbour
// that would pass it, never others.
func (t *Table) enqueue(dst []Action, e *entry, pkt []byte) []Action {
	if pkt == nil {
		return dst
	}
	for len(e.queue) >= t.o.maxQueuedPackets() && len(e.queue) > 0 {
		dst = t.discardOldest(dst, e, DropQueuePackets)
	}
	for e.queueOctets+len(pkt) > t.o.maxQueuedOctets() && len(e.queue) > 0 {
		dst = t.discardOldest(dst, e, DropQueueOctets)
	}
	for t.queued+len(pkt) > t.o.maxTotalOctets() && len(e.queue) > 0 {
		dst = t.discardOldest(dst, e, DropQueueTotal)
	}
	switch {
	case t.o.maxQueuedPackets() < 1:
		return t.discard(dst, e.ip, pkt, DropQueuePackets)
	case len(pkt) > t.o.maxQueuedOctets():
		return t.discard(dst, e.ip, pkt, DropQueueOctets)
	case t.queued+len(pkt) > t.o.maxTotalOctets():
		return t.discard(dst, e.ip, pkt, DropQueueTotal)
	}
	e.queue = append(e.queue, pkt)
	e.queueOctets += len(pkt)
	t.queued += len(pkt)
	return dst
}

func (t *Table) discardOldest(dst []Action, e *entry, why Drop) []Action {
	pkt := e.queue[0]
	e.queue[0] = nil
	e.queue = e.queue[1:]
	e.queueOctets -= len(pkt)
	t.queued -= len(pkt)
	return t.discard(dst, e.ip, pkt, why)
}

func (t *Table) discardQueue(dst []Action, e *entry, why Drop) []Action {
	for len(e.queue) > 0 {
		dst = t.discardOldest(dst, e, why)
	}
	e.queue = nil
	return dst
}

// clearQueue forgets packets that have been handed back.
func (t *Table) clearQueue(e *entry) {
	t.queued -= e.queueOctets
	e.queue, e.queueOctets = nil, 0
}
