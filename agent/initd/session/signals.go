package session

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Names of RFC 4254, section 6.10. A signal outside of them is sent with OpenSSH's stand-in.
func signalNames() map[string]syscall.Signal {
	return map[string]syscall.Signal{
		"ABRT": syscall.SIGABRT, "ALRM": syscall.SIGALRM, "FPE": syscall.SIGFPE, "HUP": syscall.SIGHUP, "ILL": syscall.SIGILL,
		"INT": syscall.SIGINT, "KILL": syscall.SIGKILL, "PIPE": syscall.SIGPIPE, "QUIT": syscall.SIGQUIT,
		"SEGV": syscall.SIGSEGV, "TERM": syscall.SIGTERM, "USR1": syscall.SIGUSR1, "USR2": syscall.SIGUSR2,
	}
}

func signalByName(name string) (syscall.Signal, bool) {
	sig, ok := signalNames()[name]
	return sig, ok
}

func signalName(sig syscall.Signal) string {
	for name, s := range signalNames() {
		if s == sig {
			return name
		}
	}
	return "SIG@openssh.com"
}

// siginfo is how a child ended: by exit status, or, when signal is not 0, by that signal.
type siginfo struct {
	status int
	signal syscall.Signal
	core   bool
}

// Values of si_code for SIGCHLD, <bits/siginfo-consts.h>.
const (
	cldExited = 1
	cldDumped = 3
)

// parseSiginfo reads the SIGCHLD part of a siginfo_t on 64-bit Linux: si_signo, si_errno and si_code are ints at 0, 4 and 8,
// then, aligned to 8, si_pid at 16, si_uid at 20 and si_status at 24.
func parseSiginfo(info *unix.Siginfo) siginfo {
	status := *(*int32)(unsafe.Add(unsafe.Pointer(info), 24))
	if info.Code == cldExited {
		return siginfo{status: int(status)}
	}
	return siginfo{signal: syscall.Signal(status), core: info.Code == cldDumped}
}
