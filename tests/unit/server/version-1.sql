BEGIN TRANSACTION;
CREATE TABLE jobs (
	sequence INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	name TEXT NOT NULL, 
	request TEXT, 
	record TEXT, 
	knowledge TEXT, 
	state TEXT NOT NULL, 
	submitted_at FLOAT NOT NULL, 
	finished_at FLOAT, 
	UNIQUE (name), 
	FOREIGN KEY(knowledge) REFERENCES knowledge (label)
);
INSERT INTO "jobs" VALUES(1,'ended','{"version":1,"command":["sleep","9"],"name":"ended","application":"","kind":"fixed","min_replicas":null,"max_replicas":null,"replicas":null,"is_preemptible":true,"checkpoints":false,"weight":1.0,"max_restarts":3,"cwd":null,"env":{},"time_limit_s":null,"after":[],"array":"","array_index":null,"accelerators":[]}','{"version":1,"spec":{"version":1,"name":"ended","application":"","submitted_at":1794777374.051038,"batch":null,"min_replicas":1,"max_replicas":1,"requested_replicas":1,"requested_batch_size":null,"is_preemptible":false,"weight":1.0,"accelerators":null},"sequence":1,"state":"succeeded","allocation":[],"leaving":[],"generation":1,"num_crashes":0,"attained_s":0.05421781539916992,"gpu_s":0.05421781539916992,"accounted_at":1794777374.3633864,"started_at":1794777374.0955062,"finished_at":1794777374.149724,"exit_code":null,"reason":"succeeded","stops_as":"pending","stop_reason":"","noise_scale":null,"remaining_examples":null,"progress":null,"total_batch":null,"history":[[1794777374.0955062,"pending","starting","1 replica"],[1794777374.0955062,"starting","running","generation 1 trains"],[1794777374.149724,"running","succeeded","succeeded"]]}','job ended','succeeded',1.79477737405103802675e+09,1.79477737414972400662e+09);
INSERT INTO "jobs" VALUES(2,'active','{"version":1,"command":["python","train.py"],"name":"active","application":"","kind":"fixed","min_replicas":null,"max_replicas":null,"replicas":null,"is_preemptible":true,"checkpoints":false,"weight":1.0,"max_restarts":3,"cwd":null,"env":{},"time_limit_s":null,"after":[],"array":"","array_index":null,"accelerators":[]}','{"version":1,"spec":{"version":1,"name":"active","application":"","submitted_at":1794777374.3769367,"batch":{"initial":32,"maximum":512,"device_min":1,"device_max":64,"minimum":32},"min_replicas":1,"max_replicas":1,"requested_replicas":1,"requested_batch_size":null,"is_preemptible":false,"weight":1.0,"accelerators":null},"sequence":2,"state":"running","allocation":[["a",1]],"leaving":[],"generation":1,"num_crashes":0,"attained_s":0.0,"gpu_s":0.0,"accounted_at":1794777374.4127028,"started_at":1794777374.4127028,"finished_at":null,"exit_code":null,"reason":"generation 1 trains","stops_as":"pending","stop_reason":"","noise_scale":100.0,"remaining_examples":1000.0,"progress":0.5,"total_batch":32,"history":[[1794777374.4127028,"pending","starting","1 replica"],[1794777374.4127028,"starting","running","generation 1 trains"]]}','job active','running',1.79477737437693667414e+09,NULL);
CREATE TABLE knowledge (
	label TEXT NOT NULL, 
	form TEXT NOT NULL, 
	PRIMARY KEY (label)
);
INSERT INTO "knowledge" VALUES('job ended','{"version":1,"label":"job ended","timings":{},"max_replicas":0,"first_noise_scale":null}');
INSERT INTO "knowledge" VALUES('job active','{"version":1,"label":"job active","timings":{"cpu":[[1,1,32,0.1,0.1,10]]},"max_replicas":1,"first_noise_scale":100.0}');
CREATE TABLE meta (
	version INTEGER NOT NULL, 
	created FLOAT NOT NULL
);
INSERT INTO "meta" VALUES(1,1.79477737394950985906e+09);
CREATE TABLE reports (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	job TEXT NOT NULL, 
	at FLOAT NOT NULL, 
	report TEXT NOT NULL, 
	FOREIGN KEY(job) REFERENCES jobs (name)
);
INSERT INTO "reports" VALUES(1,'active',1.79477737443157267568e+09,'{"version":2,"job":"active","batch":{"initial":32,"maximum":512,"device_min":1,"device_max":64,"minimum":32},"generation":1,"num_replicas":1,"num_nodes":1,"accelerator":"some name of torch''s","epoch":0,"num_steps":10,"progress":0.5,"remaining_examples":1000.0,"stalled_s":0.0,"device_batch":32,"accum_steps":0,"total_batch":32,"noise_scale":100.0,"efficiency":1.0,"gain":1.0,"throughput":50.0,"goodput":50.0,"replica":null,"timings":[[1,1,32,0.1,0.1,10]],"metrics":{"loss":0.5}}');
CREATE TABLE resizes (
	job TEXT NOT NULL, 
	generation INTEGER NOT NULL, 
	at FLOAT NOT NULL, 
	"before" TEXT NOT NULL, 
	"after" TEXT NOT NULL, 
	runs_at FLOAT, 
	PRIMARY KEY (job, generation), 
	FOREIGN KEY(job) REFERENCES jobs (name)
);
INSERT INTO "resizes" VALUES('ended',1,1.79477737409550619127e+09,'[]','[["a",1]]',1.79477737409550619127e+09);
INSERT INTO "resizes" VALUES('active',1,1.79477737441270279879e+09,'[]','[["a",1]]',1.79477737441270279879e+09);
CREATE TABLE rounds (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	number INTEGER NOT NULL, 
	at FLOAT NOT NULL, 
	"trigger" TEXT NOT NULL, 
	"plan" TEXT NOT NULL, 
	error TEXT NOT NULL, 
	snapshot TEXT NOT NULL, 
	decision_s FLOAT NOT NULL, 
	num_jobs INTEGER NOT NULL, 
	num_slots INTEGER NOT NULL
);
INSERT INTO "rounds" VALUES(1,1,1.79477737409550619127e+09,'restart','{"version":1,"allocations":{"ended":[["a",1]]},"explanation":{"fitness_before":0.0,"fitness":0.25,"upper_bound":0.25,"decision_s":0.0008802080046734773,"jobs":[{"job":"ended","before":[],"after":[["a",1]],"speedup_before":0.0,"speedup_after":0.25,"move_factor":1.0,"option_replicas":[0,1],"option_speedups":[0.0,0.25],"note":"not measured yet: assumed to scale perfectly"}],"method":"knapsack"}}','','{"version":1,"now":1794777374.0955062,"nodes":[{"name":"a","num_slots":4,"accelerator":"cpu"}],"models":[{"params":{},"shape_factors":{},"batch":null}],"jobs":[{"name":"ended","age_s":0.04446816444396973,"allocation":[],"num_restarts":null,"attained_s":0.0,"model":0,"noise_scale":null,"max_profiled_replicas":0,"remaining_examples":null,"is_pinned":false}]}',8.80208004673477262258e-04,1,4);
INSERT INTO "rounds" VALUES(2,2,1.79477737441270279879e+09,'submit','{"version":1,"allocations":{"active":[["a",1]]},"explanation":{"fitness_before":0.0,"fitness":0.25,"upper_bound":0.25,"decision_s":0.0007470839991583489,"jobs":[{"job":"active","before":[],"after":[["a",1]],"speedup_before":0.0,"speedup_after":0.25,"move_factor":1.0,"option_replicas":[0,1],"option_speedups":[0.0,0.25],"note":"not measured yet: assumed to scale perfectly"}],"method":"knapsack"}}','','{"version":1,"now":1794777374.4127028,"nodes":[{"name":"a","num_slots":4,"accelerator":"cpu"}],"models":[{"params":{},"shape_factors":{},"batch":null}],"jobs":[{"name":"active","age_s":0.0357661247253418,"allocation":[],"num_restarts":null,"attained_s":0.0,"model":0,"noise_scale":null,"max_profiled_replicas":0,"remaining_examples":null,"is_pinned":false}]}',7.47083999158348888158e-04,1,4);
CREATE TABLE secrets (
	job TEXT NOT NULL, 
	token_hash TEXT NOT NULL, 
	PRIMARY KEY (job), 
	FOREIGN KEY(job) REFERENCES jobs (name), 
	UNIQUE (token_hash)
);
INSERT INTO "secrets" VALUES('ended','8be36bf6aa2068d3efd29277d58ca8dd92803dad8da5d3983b6984f04e2276e4');
INSERT INTO "secrets" VALUES('active','a99aeef3134845ff76cbc715ae875c4e4e06ed3d76454cf8220f686f4317991c');
CREATE TABLE transitions (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	job TEXT NOT NULL, 
	at FLOAT NOT NULL, 
	source TEXT NOT NULL, 
	target TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	FOREIGN KEY(job) REFERENCES jobs (name)
);
INSERT INTO "transitions" VALUES(1,'ended',1.79477737409550619127e+09,'pending','starting','1 replica');
INSERT INTO "transitions" VALUES(2,'ended',1.79477737409550619127e+09,'starting','running','generation 1 trains');
INSERT INTO "transitions" VALUES(3,'ended',1.79477737414972400662e+09,'running','succeeded','succeeded');
INSERT INTO "transitions" VALUES(4,'active',1.79477737441270279879e+09,'pending','starting','1 replica');
INSERT INTO "transitions" VALUES(5,'active',1.79477737441270279879e+09,'starting','running','generation 1 trains');
CREATE INDEX ix_jobs_state ON jobs (state);
CREATE INDEX transitions_by_job ON transitions (job, id);
CREATE INDEX reports_by_job ON reports (job, id);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('jobs',2);
INSERT INTO "sqlite_sequence" VALUES('rounds',3);
INSERT INTO "sqlite_sequence" VALUES('transitions',5);
INSERT INTO "sqlite_sequence" VALUES('reports',1);
COMMIT;
