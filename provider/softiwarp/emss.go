package softiwarp

import "golang.org/x/sys/unix"

// defaultEMSS is the maximum segment size in octets if the kernel reports none, as for connections
// other than TCP.
const defaultEMSS = 16384

// maxSegment asks the kernel for the segment size of a TCP socket. It returns 0 if the kernel does
// not report it.
func maxSegment(fd int) int {
	n, err := unix.GetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_MAXSEG)
	if err != nil {
		return 0
	}
	return n
}
