package stream

import (
	"net"
	"syscall"
	"unsafe"
)

const (
	// offset of tcpi_bytes_acked in struct tcp_info, linux/tcp.h: 8 bytes,
	// 24 words, two pacing rates. In the kernel since 4.1.
	tcpInfoBytesAcked = 8 + 24*4 + 2*8
	sizeofTCPInfo     = tcpInfoBytesAcked + 8
)

// kernelProgress returns a number that changes when the peer of c takes bytes:
// those acknowledged on TCP, those still unread on a unix socket; 0 where the
// kernel does not tell.
func kernelProgress(c net.Conn) uint64 {
	raw := bottom(c)
	sc, ok := raw.(syscall.Conn)
	if !ok {
		return 0
	}
	rc, err := sc.SyscallConn()
	if err != nil {
		return 0
	}
	_, isTCP := raw.(*net.TCPConn)
	var n uint64
	_ = rc.Control(func(fd uintptr) { // a closed socket makes no progress
		if isTCP {
			n = bytesAcked(fd)
		} else {
			n = bytesUnread(fd)
		}
	})
	return n
}

func bytesAcked(fd uintptr) uint64 {
	var info [sizeofTCPInfo / 8]uint64 // words, for the alignment
	size := uint32(sizeofTCPInfo)
	_, _, e := syscall.Syscall6(syscall.SYS_GETSOCKOPT, fd, syscall.IPPROTO_TCP, syscall.TCP_INFO,
		uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0)
	if e != 0 || size < sizeofTCPInfo {
		return 0
	}
	return info[tcpInfoBytesAcked/8]
}

func bytesUnread(fd uintptr) uint64 {
	var n int32
	_, _, e := syscall.Syscall(syscall.SYS_IOCTL, fd, syscall.TIOCOUTQ, uintptr(unsafe.Pointer(&n)))
	if e != 0 {
		return 0
	}
	return uint64(n)
}
