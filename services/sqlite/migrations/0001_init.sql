-- Times are INTEGER unix milliseconds on the gateway's time line; NULL means "not yet". JSON stands only where nothing is looked up by it.

CREATE TABLE meta (
  key   TEXT NOT NULL PRIMARY KEY,
  value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

INSERT INTO meta (key, value) VALUES ('database_generation', 1), ('last_commit', 0), ('writer', 0);

-- Who ----------------------------------------------------------------------------------------------------------------

CREATE TABLE project (
  name        TEXT NOT NULL PRIMARY KEY,
  description TEXT NOT NULL,
  created_at  INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

INSERT INTO project (name, description, created_at) VALUES ('default', 'where every user starts', 0);

CREATE TABLE user (
  id         TEXT NOT NULL PRIMARY KEY,
  name       TEXT NOT NULL,
  login      TEXT NOT NULL,
  uid        INTEGER NOT NULL,
  gid        INTEGER NOT NULL,
  groups     TEXT NOT NULL,
  role       TEXT NOT NULL CHECK (role IN ('member', 'admin')),
  project    TEXT NOT NULL REFERENCES project (name),
  gpu_limit  INTEGER,
  disabled   INTEGER NOT NULL CHECK (disabled IN (0, 1)),
  created_at INTEGER NOT NULL,
  deleted_at INTEGER
) STRICT, WITHOUT ROWID;

CREATE UNIQUE INDEX user_name ON user (name) WHERE deleted_at IS NULL;
CREATE UNIQUE INDEX user_login ON user (login) WHERE deleted_at IS NULL;
CREATE UNIQUE INDEX user_uid ON user (uid) WHERE deleted_at IS NULL;
CREATE INDEX user_any_uid ON user (uid);

CREATE TABLE project_member (
  project TEXT NOT NULL REFERENCES project (name),
  user    TEXT NOT NULL REFERENCES user (id),
  PRIMARY KEY (project, user)
) STRICT, WITHOUT ROWID;

CREATE TABLE token (
  id           TEXT NOT NULL PRIMARY KEY,
  user         TEXT NOT NULL REFERENCES user (id),
  label        TEXT NOT NULL,
  hash         BLOB NOT NULL UNIQUE CHECK (length(hash) = 32),
  created_at   INTEGER NOT NULL,
  last_used_at INTEGER,
  expires_at   INTEGER,
  revoked_at   INTEGER
) STRICT, WITHOUT ROWID;

CREATE INDEX token_user ON token (user);

CREATE TABLE sign_in (
  hash       BLOB NOT NULL PRIMARY KEY CHECK (length(hash) = 32),
  user       TEXT NOT NULL REFERENCES user (id),
  expires_at INTEGER NOT NULL,
  used_at    INTEGER
) STRICT, WITHOUT ROWID;

CREATE TABLE device_key (
  id          TEXT NOT NULL PRIMARY KEY,
  user        TEXT NOT NULL REFERENCES user (id),
  public_key  TEXT NOT NULL,
  fingerprint TEXT NOT NULL,
  label       TEXT NOT NULL,
  created_at  INTEGER NOT NULL,
  revoked_at  INTEGER
) STRICT, WITHOUT ROWID;

CREATE UNIQUE INDEX device_key_fingerprint ON device_key (fingerprint) WHERE revoked_at IS NULL;
CREATE INDEX device_key_user ON device_key (user) WHERE revoked_at IS NULL;

-- Where --------------------------------------------------------------------------------------------------------------

CREATE TABLE pool (
  name                   TEXT NOT NULL PRIMARY KEY,
  description            TEXT NOT NULL,
  default_image          TEXT NOT NULL,
  sudo                   INTEGER NOT NULL CHECK (sudo IN (0, 1)),
  is_default             INTEGER NOT NULL CHECK (is_default IN (0, 1)),
  max_gpus_per_workspace INTEGER NOT NULL CHECK (max_gpus_per_workspace >= 0),
  default_cpu_millis     INTEGER NOT NULL CHECK (default_cpu_millis >= 0),
  default_memory_mib     INTEGER NOT NULL CHECK (default_memory_mib >= 0)
) STRICT, WITHOUT ROWID;

CREATE UNIQUE INDEX pool_default ON pool (is_default) WHERE is_default = 1;

INSERT INTO pool (name, description, default_image, sudo, is_default, max_gpus_per_workspace, default_cpu_millis, default_memory_mib)
VALUES ('default', 'all hosts that joined without naming a pool', '', 1, 1, 0, 0, 0);

CREATE TABLE host (
  id                  TEXT NOT NULL PRIMARY KEY,
  name                TEXT NOT NULL UNIQUE,
  pool                TEXT NOT NULL REFERENCES pool (name),
  public_key          BLOB NOT NULL,
  session             INTEGER NOT NULL,
  generation          INTEGER NOT NULL,
  after_seq           INTEGER NOT NULL,
  journal_id          TEXT NOT NULL,
  boot_id             TEXT NOT NULL,
  draining            INTEGER NOT NULL CHECK (draining IN (0, 1)),
  fenced              INTEGER NOT NULL CHECK (fenced IN (0, 1)),
  last_seen           INTEGER,
  agent_version       TEXT NOT NULL,
  engine_version      TEXT NOT NULL,
  os                  TEXT NOT NULL,
  cpus                INTEGER NOT NULL,
  memory_mib          INTEGER NOT NULL,
  reserved_cpu_millis INTEGER NOT NULL,
  reserved_memory_mib INTEGER NOT NULL,
  disk_free_mib       INTEGER NOT NULL,
  gpu_source          TEXT NOT NULL,
  driver_version      TEXT NOT NULL,
  cuda_version        TEXT NOT NULL,
  problems            TEXT NOT NULL,
  unmanaged           TEXT NOT NULL,
  clock_skew_ms       INTEGER NOT NULL,
  joined_at           INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX host_pool ON host (pool);

CREATE TABLE join_token (
  hash       BLOB NOT NULL PRIMARY KEY CHECK (length(hash) = 32),
  pool       TEXT NOT NULL REFERENCES pool (name),
  host       TEXT NOT NULL, -- name that must join with it; empty: any
  expires_at INTEGER NOT NULL,
  used_at    INTEGER,
  used_by    TEXT REFERENCES host (id)
) STRICT, WITHOUT ROWID;

CREATE TABLE device (
  id                 TEXT NOT NULL PRIMARY KEY,
  host               TEXT NOT NULL REFERENCES host (id),
  ordinal            INTEGER NOT NULL, -- as the driver counts, for the eye only
  product            TEXT NOT NULL,
  model              TEXT NOT NULL,
  memory_mib         INTEGER NOT NULL,
  compute_capability TEXT NOT NULL,
  pci_bus_id         TEXT NOT NULL,
  kind               TEXT NOT NULL,
  parent             TEXT NOT NULL,
  simulated          INTEGER NOT NULL CHECK (simulated IN (0, 1)),
  present            INTEGER NOT NULL CHECK (present IN (0, 1)),
  health             TEXT NOT NULL,
  health_reason      TEXT NOT NULL,
  excluded           INTEGER NOT NULL CHECK (excluded IN (0, 1)),
  excluded_reason    TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX device_host ON device (host);
CREATE INDEX device_parent ON device (parent) WHERE parent <> '';

CREATE TABLE image (
  name         TEXT NOT NULL PRIMARY KEY,
  reference    TEXT NOT NULL,
  digest       TEXT NOT NULL,
  host         TEXT REFERENCES host (id),
  description  TEXT NOT NULL,
  is_default   INTEGER NOT NULL CHECK (is_default IN (0, 1)),
  require_cuda TEXT NOT NULL,
  size_bytes   INTEGER NOT NULL,
  created_at   INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE UNIQUE INDEX image_default ON image (is_default) WHERE is_default = 1;

-- What ---------------------------------------------------------------------------------------------------------------

CREATE TABLE volume (
  id         TEXT NOT NULL PRIMARY KEY,
  name       TEXT NOT NULL,
  owner      TEXT NOT NULL REFERENCES user (id),
  host       TEXT REFERENCES host (id), -- NULL until first placed
  home_of    TEXT NOT NULL,
  created_at INTEGER NOT NULL,
  deleted_at INTEGER,
  removed_at INTEGER
) STRICT, WITHOUT ROWID;

CREATE UNIQUE INDEX volume_name ON volume (owner, name) WHERE deleted_at IS NULL;
CREATE INDEX volume_deleted ON volume (deleted_at) WHERE deleted_at IS NOT NULL AND removed_at IS NULL;

CREATE TABLE workspace (
  id             TEXT NOT NULL PRIMARY KEY,
  name           TEXT NOT NULL,
  owner          TEXT NOT NULL REFERENCES user (id),
  project        TEXT NOT NULL REFERENCES project (name),
  spec           TEXT NOT NULL,
  pending        TEXT NOT NULL, -- spec of the next run; empty: as spec
  origins        TEXT NOT NULL,
  goal           TEXT NOT NULL,
  state          TEXT NOT NULL,
  reason         TEXT NOT NULL,
  epoch          INTEGER NOT NULL,
  epoch_floor    INTEGER NOT NULL, -- highest epoch that any host spoke of; the next run's is above it
  created_at     INTEGER NOT NULL,
  deleted_at     INTEGER,
  version        INTEGER NOT NULL,
  restart        INTEGER NOT NULL CHECK (restart IN (0, 1)),
  drop_home      INTEGER NOT NULL CHECK (drop_home IN (0, 1)),
  sudo           TEXT NOT NULL,
  reused_volume  TEXT NOT NULL,
  host_key       BLOB NOT NULL,
  home_volume    TEXT NOT NULL,
  home_target    TEXT NOT NULL,
  stop_grace_ms  INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE UNIQUE INDEX workspace_name ON workspace (owner, name) WHERE state <> 'deleted';
CREATE INDEX workspace_state ON workspace (state) WHERE state NOT IN ('deleted', 'stopped', 'failed');

CREATE TABLE run (
  workspace        TEXT NOT NULL REFERENCES workspace (id),
  epoch            INTEGER NOT NULL CHECK (epoch > 0),
  host             TEXT REFERENCES host (id),
  gpus             INTEGER NOT NULL CHECK (gpus >= 0),
  image_digest     TEXT NOT NULL,
  cpu_millis       INTEGER NOT NULL,
  memory_mib       INTEGER NOT NULL,
  shm_mib          INTEGER NOT NULL,
  pids_limit       INTEGER NOT NULL,
  submitted_at     INTEGER NOT NULL, -- first submission, kept when a run is queued again before it started
  queued_at        INTEGER NOT NULL,
  placed_at        INTEGER,
  started_at       INTEGER,
  ready_at         INTEGER,
  ended_at         INTEGER,
  ended_unattested INTEGER NOT NULL CHECK (ended_unattested IN (0, 1)),
  gone_at          INTEGER,          -- commit at which nothing of it could hold a device any more
  host_clear       INTEGER NOT NULL CHECK (host_clear IN (0, 1)), -- its host has nothing of it: no need to name it any more
  goal             TEXT NOT NULL,
  goal_reason      TEXT NOT NULL,
  stop_grace_ms    INTEGER NOT NULL,
  container_id     TEXT NOT NULL,
  reason           TEXT NOT NULL,
  PRIMARY KEY (workspace, epoch),
  CHECK (placed_at IS NULL OR host IS NOT NULL)
) STRICT, WITHOUT ROWID;

CREATE INDEX run_waiting ON run (submitted_at, workspace) WHERE placed_at IS NULL AND gone_at IS NULL;
CREATE UNIQUE INDEX run_live ON run (workspace) WHERE gone_at IS NULL;
CREATE INDEX run_host ON run (host) WHERE gone_at IS NULL;
CREATE INDEX run_unclear ON run (host) WHERE host_clear = 0;

-- Mounts belong to a run (epoch 0: asked for by a workspace that never ran). live is 1 from placement until the run is gone.
CREATE TABLE mount (
  workspace TEXT NOT NULL REFERENCES workspace (id),
  epoch     INTEGER NOT NULL,
  position  INTEGER NOT NULL,
  volume    TEXT REFERENCES volume (id), -- NULL: a declared mount of this name
  name      TEXT NOT NULL,
  target    TEXT NOT NULL,
  read_only INTEGER NOT NULL CHECK (read_only IN (0, 1)),
  home      INTEGER NOT NULL CHECK (home IN (0, 1)),
  live      INTEGER NOT NULL CHECK (live IN (0, 1)),
  PRIMARY KEY (workspace, epoch, position)
) STRICT, WITHOUT ROWID;

CREATE UNIQUE INDEX mount_target ON mount (workspace, epoch, target);
CREATE UNIQUE INDEX mount_writer ON mount (volume) WHERE live = 1 AND read_only = 0;
CREATE INDEX mount_volume ON mount (volume);

CREATE TABLE reservation (
  workspace TEXT NOT NULL REFERENCES workspace (id),
  epoch     INTEGER NOT NULL,
  host      TEXT NOT NULL REFERENCES host (id),
  devices   TEXT NOT NULL,
  since     INTEGER NOT NULL,
  PRIMARY KEY (workspace, epoch)
) STRICT, WITHOUT ROWID;

CREATE TABLE request (
  owner       TEXT NOT NULL REFERENCES user (id),
  request_id  TEXT NOT NULL,
  fingerprint TEXT NOT NULL,
  workspace   TEXT NOT NULL REFERENCES workspace (id),
  created_at  INTEGER NOT NULL,
  PRIMARY KEY (owner, request_id)
) STRICT, WITHOUT ROWID;

CREATE INDEX request_age ON request (created_at);

-- Money --------------------------------------------------------------------------------------------------------------

-- What is billed is [started_at, ended_at); the device is held until released_at. user to workspace_name are as billed now; the
-- ledger has what they were.
CREATE TABLE lease (
  id          INTEGER PRIMARY KEY AUTOINCREMENT,
  device      TEXT NOT NULL REFERENCES device (id),
  workspace   TEXT NOT NULL,
  epoch       INTEGER NOT NULL,
  host        TEXT NOT NULL REFERENCES host (id),
  user        TEXT NOT NULL REFERENCES user (id),
  project     TEXT NOT NULL REFERENCES project (name),
  pool        TEXT NOT NULL REFERENCES pool (name),
  model       TEXT NOT NULL,
  started_at  INTEGER NOT NULL,
  ended_at    INTEGER CHECK (ended_at >= started_at),
  released_at INTEGER CHECK (released_at >= ended_at),
  changes     INTEGER NOT NULL DEFAULT 0, -- change facts in the ledger
  FOREIGN KEY (workspace, epoch) REFERENCES run (workspace, epoch),
  CHECK ((ended_at IS NULL) = (released_at IS NULL))
) STRICT;

CREATE UNIQUE INDEX lease_open ON lease (device) WHERE released_at IS NULL;
CREATE INDEX lease_open_user ON lease (user) WHERE released_at IS NULL;
CREATE INDEX lease_open_host ON lease (host) WHERE released_at IS NULL;
CREATE INDEX lease_run ON lease (workspace, epoch);
CREATE INDEX lease_ended ON lease (ended_at, started_at) WHERE ended_at IS NOT NULL;
CREATE INDEX lease_user_ended ON lease (user, ended_at) WHERE ended_at IS NOT NULL;

CREATE TRIGGER lease_family BEFORE INSERT ON lease
WHEN EXISTS (
  SELECT 1 FROM device AS child JOIN lease AS held ON held.device = child.id AND held.released_at IS NULL
  WHERE child.parent = NEW.device AND child.parent <> ''
) OR EXISTS (
  SELECT 1 FROM device AS self JOIN lease AS held ON held.device = self.parent AND held.released_at IS NULL
  WHERE self.id = NEW.device AND self.parent <> ''
)
BEGIN
  SELECT RAISE(ABORT, 'a part of the device or the whole that it is part of is leased');
END;

CREATE TRIGGER lease_end_once BEFORE UPDATE OF ended_at, released_at ON lease
WHEN OLD.released_at IS NOT NULL
BEGIN
  SELECT RAISE(ABORT, 'the end of a lease is written once');
END;

CREATE TRIGGER lease_fixed BEFORE UPDATE OF device, workspace, epoch, host, started_at ON lease
BEGIN
  SELECT RAISE(ABORT, 'what a lease binds never changes');
END;

CREATE TRIGGER lease_kept BEFORE DELETE ON lease
BEGIN
  SELECT RAISE(ABORT, 'leases are kept');
END;

-- One row per fact; hash covers the row before and this one's fields (see ledger.go).
CREATE TABLE ledger (
  id           INTEGER PRIMARY KEY,
  lease        INTEGER NOT NULL REFERENCES lease (id),
  kind         TEXT NOT NULL CHECK (kind IN ('open', 'change', 'end')),
  at           INTEGER NOT NULL,
  committed_at INTEGER NOT NULL CHECK (committed_at >= at),
  user         TEXT NOT NULL,
  project      TEXT NOT NULL,
  pool         TEXT NOT NULL,
  model        TEXT NOT NULL,
  workspace    TEXT NOT NULL,
  hash         BLOB NOT NULL CHECK (length(hash) = 32)
) STRICT;

CREATE INDEX ledger_lease ON ledger (lease, id);
CREATE UNIQUE INDEX ledger_open ON ledger (lease) WHERE kind = 'open';
CREATE UNIQUE INDEX ledger_end ON ledger (lease) WHERE kind = 'end';

CREATE TRIGGER ledger_no_update BEFORE UPDATE ON ledger
BEGIN
  SELECT RAISE(ABORT, 'the ledger is append-only');
END;

CREATE TRIGGER ledger_no_delete BEFORE DELETE ON ledger
BEGIN
  SELECT RAISE(ABORT, 'the ledger is append-only');
END;

CREATE TRIGGER ledger_order BEFORE INSERT ON ledger
WHEN NEW.committed_at < (SELECT committed_at FROM ledger ORDER BY id DESC LIMIT 1)
BEGIN
  SELECT RAISE(ABORT, 'ledger time never goes back');
END;

CREATE TABLE rate (
  model           TEXT NOT NULL,
  valid_from      INTEGER NOT NULL,
  micros_per_hour INTEGER NOT NULL CHECK (micros_per_hour >= 0),
  currency        TEXT NOT NULL,
  PRIMARY KEY (model, valid_from)
) STRICT, WITHOUT ROWID;

-- What samples saw, by UTC hour; what is missing to the hour's lease time is unknown.
CREATE TABLE lease_activity (
  lease     INTEGER NOT NULL,
  hour      INTEGER NOT NULL, -- its start
  active_ms INTEGER NOT NULL,
  idle_ms   INTEGER NOT NULL,
  PRIMARY KEY (lease, hour)
) STRICT, WITHOUT ROWID;

-- The sum of a lease's hours, kept in the same transaction.
CREATE TABLE lease_total (
  lease      INTEGER NOT NULL PRIMARY KEY,
  active_ms  INTEGER NOT NULL,
  idle_ms    INTEGER NOT NULL,
  sampled_to INTEGER NOT NULL -- end of what samples covered
) STRICT;

-- Records ------------------------------------------------------------------------------------------------------------

CREATE TABLE event (
  id        INTEGER PRIMARY KEY,
  workspace TEXT NOT NULL,
  epoch     INTEGER NOT NULL,
  at        INTEGER NOT NULL,
  state     TEXT NOT NULL,
  code      TEXT NOT NULL,
  message   TEXT NOT NULL
) STRICT;

CREATE INDEX event_workspace ON event (workspace, id);

CREATE TABLE audit (
  id      INTEGER PRIMARY KEY,
  at      INTEGER NOT NULL,
  actor   TEXT NOT NULL,
  verb    TEXT NOT NULL,
  subject TEXT NOT NULL
) STRICT;

CREATE INDEX audit_at ON audit (at);
