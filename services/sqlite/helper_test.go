package sqlite_test

import (
	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/sqlite"
)

func deviceFilter(host fleet.HostID) sqlite.DeviceFilter { return sqlite.DeviceFilter{Host: host} }
