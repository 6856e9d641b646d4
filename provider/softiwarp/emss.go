package softiwarp

import "golang.org/x/sys/unix"

// defaultEMSS stands for the maximum segment size of what is no TCP, in octets.
const defaultEMSS = 16384

// maxSegment asks the kernel for the segment size of a TCP socket.
func maxSegment(fd int) int {
	n, err := unix.GetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_MAXSEG)
	if err != nil {
		return 0
	}
	return n
}
