package softiwarp

import (
	"encoding/binary"

	"ipoibcm/mpa"
	"ipoibcm/verbs"
	"ipoibcm/verbs/regions"
)

// A memory is the registered regions, by STag. Peers access them under the lock of a queue
// pair. Deregister takes each such lock once, and so waits for accesses that have begun.
type memory struct{ regions.Table }

// look returns the n octets at offset to of the region stag, or an error. The error of a Write has
// a cause of DDP (RFC 5041 section 7.2), that of a Read's source a cause of RDMAP (RFC 5040 section
// 4.8). Lack of access is RDMAPAccess for both.
func (m *memory) look(stag uint32, to, n uint64, access verbs.Access) ([]byte, *mpa.TermError) {
	cause := [...]mpa.Cause{mpa.DDPInvalidSTag, mpa.DDPBounds, mpa.DDPWrap}
	if access == verbs.RemoteRead {
		cause = [...]mpa.Cause{mpa.RDMAPInvalidSTag, mpa.RDMAPBounds, mpa.RDMAPWrap}
	}
	b, why := m.Find(stag, to, n, access)
	switch why {
	case regions.NoRegion:
		return nil, terminate(cause[0], "STag %#x", stag)
	case regions.NoAccess:
		return nil, terminate(mpa.RDMAPAccess, "STag %#x", stag)
	case regions.Wraps:
		return nil, terminate(cause[2], "%d octets at %#x", n, to)
	case regions.Outside:
		return nil, terminate(cause[1], "%d octets at %#x", n, to)
	}
	return b, nil
}

func random32(rand func([]byte)) uint32 {
	var b [4]byte
	rand(b[:])
	return binary.LittleEndian.Uint32(b[:])
}
